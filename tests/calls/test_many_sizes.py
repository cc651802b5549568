"""Batches of many sizes: the numbers of one device, and memory that does not grow with them."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tutti
from ranks import Ranks
from small_steps import trained
from tutti.environment import MOST_PROGRAMS
from tutti.errors import TuttiError
from tutti.state.residences import residence_of

LENGTHS = (8, 12, 16, 10, 8, 18)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / tokens.shape[1]


def losses_of(layout: str | None) -> list[float]:
    """Losses of a run over batches of many lengths; without a layout, in plain PyTorch."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = trained(loss_of)
    played = tutti.distribute(step, model, optimizer, layout) if layout is not None else None
    torch.manual_seed(1)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(32, (4, length))
        found.append((played(tokens) if played else step(model, optimizer, tokens)).item())
    if played is not None and played.layout.num_ranks > 1:
        home = residence_of(model, played.layout)
        for shared in home.shared.arenas:  # buffers of all programs lie in the same few
            assert len(shared._arenas._arenas) <= 3
    return found


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_ranks_train_as_one_over_many_lengths(ranks: Ranks, layout: str) -> None:
    expected = losses_of(None)
    for found in ranks.run(losses_of, layout, n=2):
        assert found == pytest.approx(expected, rel=1e-10)


def test_no_more_programs_are_kept_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOST_PROGRAMS.name, "2")
    model = nn.Linear(4, 4)
    step = tutti.distribute(lambda m, x: m(x).sum(), model, None, "")
    kept: list[weakref.ref[object]] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (2, 3, 4, 3, 5, 6):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(step(x), model(x).sum())
            assert step._last is not None
            kept.append(weakref.ref(step._last.execution))
    gc.collect()
    alive = {i for i, one in enumerate(kept) if one() is not None}
    assert alive == {4, 5}  # those of 5 and of 6 rows
    dropped = [str(w.message) for w in said if "drops the least" in str(w.message)]
    assert len(dropped) == 1 and "more than 2 programs" in dropped[0]


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", ""])
def test_a_bound_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(MOST_PROGRAMS.name, given)
    with pytest.raises(TuttiError, match=f"{MOST_PROGRAMS.name}={given} is no number of programs"):
        tutti.distribute(lambda m, x: m(x).sum(), nn.Linear(4, 4), None, "")


def held() -> dict[str, int]:
    """Live graphs and nodes; descriptors and threads of this process."""
    gc.collect()
    alive = [type(x) for x in gc.get_objects()]
    return {
        "graphs": alive.count(fx.Graph),
        "nodes": alive.count(fx.Node),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


@pytest.mark.filterwarnings("ignore:the step has")
def test_what_lengths_leave_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 20 lengths, of which two are kept: after the first 8 nothing is left that was not there."""
    monkeypatch.setenv(MOST_PROGRAMS.name, "2")
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = tutti.distribute(trained(loss_of), model, optimizer, "")
    found = []
    for length in range(4, 24):
        step(torch.randint(32, (4, length)))
        if length in (11, 23):
            found.append(held())
    before, after = found
    assert after["nodes"] <= 1.1 * before["nodes"] and after["graphs"] <= 1.1 * before["graphs"]
    assert after["descriptors"] <= before["descriptors"] and after["threads"] <= before["threads"]


def test_checkpoints_and_evaluations_leave_nothing(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = tutti.distribute(trained(loss_of), model, optimizer, "")
    tokens = torch.randint(32, (4, 8))
    found = []
    for k in range(20):
        step.save(tmp_path / f"checkpoint-{k}")
        step.load(tmp_path / f"checkpoint-{k}")
        evaluation = tutti.distribute(loss_of, model, None, "")
        evaluation(tokens)
        with step.whole():
            model(tokens)
        step(tokens)
        del evaluation
        if k in (9, 19):  # a step keeps the locks of the last eight folders
            found.append(held())
    assert found[1] == found[0]
