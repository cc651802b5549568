"""What a worker asks of its servers, counted: each weight once a step, of large tables only rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from server.split.test_rows import Tables, batch, train_step
from tutti.environment import ROLE, SERVERS
from tutti.errors import ServerError
from tutti.replicas.replica_rows import rows as rows_of_replica
from tutti.server.protocol.session import Pushed
from tutti.server.split.updater import GraphUpdater
from tutti.server.wire.client import Pulled, Rows
from tutti.serving import worker_side


class OneServer:
    """In place of a `Client`: all variables whole in this process, and what was asked for."""

    state: dict[str, dict[str, Tensor]]
    asked: list[dict[str, int]]
    alone = True

    def __init__(self, addresses: Any, updater: GraphUpdater, **_: Any) -> None:
        self.updater = updater

    def join(self) -> int:
        return 0

    def leave(self) -> None: ...

    def prefetch(self, like: Mapping[str, Tensor]) -> None:
        raise AssertionError("rows that the next batch needs are not known yet")

    def pull(self, into: Mapping[str, Tensor], rows: Mapping[str, Rows] | None = None) -> Pulled:
        rows = rows or {}
        for name, x in into.items():
            x.copy_(self.state[name]["weight"])
        for name, some in rows.items():
            some.values.copy_(self.state[name]["weight"][some.rows])
        count = {n: len(x) for n, x in into.items()} | {n: len(r.rows) for n, r in rows.items()}
        self.asked.append(count)
        return Pulled({0: 0}, {})

    def push(self, gradients: Mapping[str, Tensor | Rows], numbers: Mapping[str, float]) -> Pushed:
        self.asked.append({})
        for name, g in gradients.items():
            if isinstance(g, Rows):
                self.asked[-1][name] = len(g.rows)
                dense = torch.zeros_like(self.state[name]["weight"])
                g = dense.index_copy_(0, g.rows, g.values)
            self.updater.update(name, self.state[name], g, numbers)
        return Pushed(True, 0)


@pytest.mark.parametrize("how", ["", " micro=3 remat=full", " micro=3 checked"])
def test_a_large_table_is_pulled_and_pushed_by_row(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "checked" in how:
        monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    monkeypatch.setenv(ROLE.name, "worker 0")
    monkeypatch.setenv(SERVERS.name, "nowhere:1")
    monkeypatch.setattr(worker_side, "Client", OneServer)
    monkeypatch.setattr(worker_side, "_JOINED", [])
    monkeypatch.setattr(worker_side.atexit, "register", lambda _: None)
    torch.manual_seed(0)
    model = Tables().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    OneServer.asked = asked = []
    OneServer.state = {
        n: {"weight": p.detach().clone(), "step": torch.tensor(0.0)}
        | {slot: torch.zeros_like(p) for slot in ("exp_avg", "exp_avg_sq")}
        for n, p in model.named_parameters()
    }
    layout = "replica=2 server=1 sync=async" + how.removesuffix(" checked")
    step = tutti.distribute(train_step, model, optimizer, layout)
    for k in range(3):
        loss = step(*batch(k))
        expected = train_step(plain, plain_optimizer, *rows_of_replica(batch(k), 0, 2))
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        different = len(rows_of_replica(batch(k), 0, 2)[0].unique())
        assert asked[-2] == {
            "small.weight": 10,
            "head.weight": 5,
            "head.bias": 5,
            "large.weight": different,
        }
        # what is padding, or not counted, has no gradient and does not travel
        assert 0 < asked[-1]["large.weight"] < different
    for name, p in plain.named_parameters():
        torch.testing.assert_close(OneServer.state[name]["weight"], p.detach(), rtol=0, atol=1e-12)
    assert not optimizer.state


def test_a_worker_at_another_step_than_the_others_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was started again, or comes late: its batch is not the one of the others' step."""

    class Elsewhere(OneServer):
        alone, clock = False, 3

    monkeypatch.setenv(ROLE.name, "worker 0")
    monkeypatch.setenv(SERVERS.name, "nowhere:1")
    monkeypatch.setattr(worker_side, "Client", Elsewhere)
    monkeypatch.setattr(worker_side, "_JOINED", [])
    monkeypatch.setattr(worker_side, "at_good_end", lambda _: None)
    torch.manual_seed(0)
    model = Tables().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Elsewhere.asked = []
    step = tutti.distribute(train_step, model, optimizer, "replica=2 server=1 sync=step")
    with pytest.raises(ServerError, match="comes with step 0, and the others are at step 3"):
        step(*batch(0))
    assert not Elsewhere.asked
