"""Exchanges without waiting, on real ranks: what happened there, played again one event after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import replicas_train as training
from ranks import Ranks
from tutti.replicas.replica_rows import rows

Row = NDArray[Any]
STEPS = 24


class Local:
    """One replica in plain PyTorch: its weights as one row, and a step."""

    def __init__(self, replica: int, count: int) -> None:
        self.model, _ = training.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.replica, self.count, self.steps = replica, count, 0

    @property
    def x(self) -> Row:
        parts = [p.detach().reshape(-1) for p in self.model.parameters()]
        return torch.cat(parts).numpy()

    @x.setter
    def x(self, row: Row) -> None:
        torch.nn.utils.vector_to_parameters(torch.tensor(row), self.model.parameters())

    def go_to(self, step: int) -> None:
        """Take the steps up to `step`."""
        for k in range(self.steps, step):
            batch = rows(list(training.batch_at(k)), self.replica, self.count)
            training.train_step(self.model, self.optimizer, *batch)
        self.steps = step


class Oracle:
    """All replicas, driven by what happened; the formulas of the papers on whole rows."""

    def __init__(self, elastic: bool, count: int) -> None:
        self.elastic, self.count = elastic, count
        self.locals = [Local(r, count) for r in range(count)]
        start = self.locals[0].x
        self.centre = start.copy()
        self.y = [start.copy() for _ in range(count)]
        self.base = [start.copy() for _ in range(count)]
        self.sent: dict[tuple[int, str], Row] = {}
        self.replies: dict[tuple[int, int, str], Row] = {}
        bounds = [start.size * j // count for j in range(count + 1)]
        self.parts = [slice(a, b) for a, b in pairwise(bounds)]

    def take(self, r: int, event: tuple[Any, ...]) -> bool:
        """Let an event of replica r happen, if what it needs has."""
        step, what, *rest = event
        if what == "round":
            self.begin(r, step)
        elif what == "answer":
            caller, key = rest
            if (caller, key.split(".")[0]) not in self.sent:
                return False
            self.answer(r, caller, key)
        else:
            holder, key = rest
            if (holder, r, key) not in self.replies:
                return False
            self.land(r, step, holder, key)
        return True

    def begin(self, r: int, step: int) -> None:
        one = self.locals[r]
        one.go_to(step)
        if not self.elastic:
            self.y[r] = self.y[r] + (one.x - self.base[r])
            self.base[r] = one.x = self.y[r]
        self.sent[r, str(step)] = one.x.copy()

    def answer(self, holder: int, caller: int, key: str) -> None:
        step, part, _ = key.split(".")
        x = self.sent[caller, step]
        if self.elastic:
            where = self.parts[int(part)]
            d = 0.9 / self.count * (x[where] - self.centre[where])
            self.centre[where] += d
            self.replies[holder, caller, key] = -d
        else:
            mean = (self.y[holder] + x) / 2
            self.replies[holder, caller, key] = mean - x
            self.y[holder] = mean

    def land(self, r: int, step: int, holder: int, key: str) -> None:
        one, d = self.locals[r], self.replies[holder, r, key]
        one.go_to(step)
        row = one.x.copy()
        where = self.parts[int(key.split(".")[1])] if self.elastic else slice(None)
        row[where] += d
        one.x = row
        if not self.elastic:
            self.y[r], self.base[r] = self.y[r] + d, self.base[r] + d


@pytest.mark.parametrize(
    ("sync", "count", "slow"),
    [
        ("elastic(every=2)", 2, 1),
        ("elastic(every=3)", 4, 2),
        ("pairs(every=2)", 2, 0),
        ("pairs(every=2)", 4, 3),
    ],
)
def test_what_happened_played_again_gives_the_same_weights(
    ranks: Ranks, sync: str, count: int, slow: int
) -> None:
    layout = f"replica={count} sync={sync}"
    found = ranks.run(training.train_with_calls, layout, STEPS, slow, n=count)
    oracle = Oracle(sync.startswith("elastic"), count)
    waiting = [list(events) for events, _ in found]
    at_end: list[dict[int, Row]] = [{} for _ in found]
    progress = True
    while progress:
        progress = False
        for r, events in enumerate(waiting):
            while events and oracle.take(r, events[0]):
                if events.pop(0)[1] != "answer":
                    at_end[r][oracle.locals[r].steps] = oracle.locals[r].x.copy()
                progress = True
    assert waiting == [[] for _ in found], "an event that nothing led to"
    kinds = {event[1] for events, _ in found for event in events}
    assert kinds == {"round", "answer", "land"}
    for r, (_, seen) in enumerate(found):
        assert len(at_end[r]) >= STEPS // 3 - 1
        for step, row in at_end[r].items():
            np.testing.assert_allclose(seen[step - 2], row, rtol=0, atol=1e-11)
        oracle.locals[r].go_to(STEPS)
        np.testing.assert_allclose(seen[-1], oracle.locals[r].x, rtol=0, atol=1e-11)
    assert any(np.abs(found[0][1][-1] - seen[-1]).max() > 1e-6 for _, seen in found[1:])
