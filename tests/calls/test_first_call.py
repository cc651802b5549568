"""Optimizers whose first step has another form: taken eagerly, and captured from the slots that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW

import first_steps
import tutti
from as_eager import assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.errors import CaptureError

CALLS = 6


@pytest.mark.parametrize("name", first_steps.PROGRAMS)
def test_one_device_and_verify(name: str) -> None:
    assert_as_eager(first_steps.PROGRAMS[name], "data=2 zero=3", CALLS)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "data=2 zero=3") for name in first_steps.PROGRAMS]
    + [(name, "data=2") for name in ("basis", "twice")],  # slots made by its step, or beside it
)
def test_two_ranks(ranks: Ranks, name: str, layout: str) -> None:
    assert_as_eager_on_ranks(ranks, first_steps.PROGRAMS[name], layout, CALLS)


def _losses(step: tutti.Step, calls: int) -> list[float]:
    batch = tuple(x.double() for x in first_steps.batch())
    return [float(step(*batch)) for _ in range(calls)]


def _made(name: str, layout: str) -> tutti.Step:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        train_step, model, optimizer, _ = first_steps.PROGRAMS[name]()
        return tutti.distribute(train_step, model, optimizer, layout)
    finally:
        torch.set_default_dtype(before)


def _saved_and_resumed(name: str, layout: str, path: str) -> list[list[float]]:
    """The losses after a checkpoint: of the run that saved it, and of one that loads it.

    The checkpoints are from before the first call, after it, and after the third.
    """
    first, found = _made(name, layout), []
    losses: list[float] = []
    for calls in (0, 1, 3):
        losses += _losses(first, calls - len(losses))
        first.save(Path(path) / str(calls))
    losses += _losses(first, 4)
    for calls in (0, 1, 3):
        second = _made(name, layout)
        with torch.no_grad():
            for p in second.model.parameters():
                p.mul_(3)
        second.load(Path(path) / str(calls))
        assert second.num_steps == calls
        found += [losses[calls : calls + 4], _losses(second, 4)]
    return found


@pytest.mark.parametrize("name", ["basis", "roots", "directed", "dampened", "shared"])
def test_checkpoints_before_and_after_the_first_call(name: str, tmp_path: Path) -> None:
    found = _saved_and_resumed(name, "", str(tmp_path))
    assert np.array(found[1::2]) == pytest.approx(np.array(found[::2]), rel=1e-12)


def test_checkpoints_of_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(_saved_and_resumed, "basis", "data=2 zero=3", str(tmp_path), n=2):
        assert np.array(found[1::2]) == pytest.approx(np.array(found[::2]), rel=1e-12)


def test_a_checkpoint_for_an_optimizer_that_takes_no_step_alone(tmp_path: Path) -> None:
    first = _made("twice", "")
    _losses(first, 1)
    first.save(tmp_path / "saved")
    second = _made("twice", "")
    with pytest.raises(CaptureError, match="Twice has no slots yet, and takes no step"):
        second.load(tmp_path / "saved")
    _losses(second, 1)
    second.load(tmp_path / "saved")
    assert _losses(second, 3) == pytest.approx(_losses(first, 3), rel=1e-12)


def test_the_first_call_leaves_a_program_and_shards() -> None:
    step = _made("basis", "")
    program = step.program_of([x.double() for x in first_steps.batch()])
    assert any("['basis'][0]" in name or "basis[0]" in name for name in program.captured.inputs)
    assert not step.optimizer.state
    _losses(step, 1)
    assert step.num_steps == 1
    assert "0.weight" in step.explain()
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize(
    "layout", ["replica=2 sync=average(every=2)", "replica=2 server=1 sync=step"]
)
def test_replicas_refuse(layout: str) -> None:
    train_step, model, optimizer, batch = first_steps.basis()
    with pytest.raises(CaptureError, match="Basis takes a first step of another form"):
        tutti.verify(train_step, model, optimizer, batch, layout)


def test_a_slot_that_is_a_weights_memory_and_is_read_is_refused() -> None:
    class Reads(first_steps.Twice):
        @torch.no_grad()
        def climb(self) -> None:
            for p in self.param_groups[0]["params"]:
                if "before" in self.state[p]:
                    p.add_(p - self.state[p]["before"])
            super().climb()

    train_step, model, _, batch = first_steps.twice()
    with pytest.raises(CaptureError, match="is a weight's memory after the step"):
        tutti.distribute(train_step, model, Reads(model.parameters()), "")(*batch)


def test_a_pipeline_goes_on_from_the_first_call() -> None:
    train_step, model, optimizer, batch = first_steps.roots()
    assert tutti.verify(train_step, model, optimizer, batch, "pipe=2 micro=2").ok


def _after_an_evaluation(layout: str) -> list[float]:
    """The model lies in shards when its step is called for the first time."""
    step = _made("basis", layout)
    x, y = (t.double() for t in first_steps.batch())
    evaluate = tutti.distribute(
        lambda m, x, y: (m(x) - y).square().mean(), step.model, None, layout
    )
    return [float(evaluate(x, y)), *_losses(step, 4), float(evaluate(x, y))]


def test_after_an_evaluation(ranks: Ranks) -> None:
    expected = _after_an_evaluation("")
    for found in ranks.run(_after_an_evaluation, "data=2 zero=3", n=2):
        assert found == pytest.approx(expected, rel=1e-12)


def _thawed(layout: str) -> list[float]:
    """A weight that is frozen at first takes its own first step later."""
    step = _made("basis", layout)
    step.model[0].requires_grad_(False)
    kept = list(step.optimizer.param_groups[0]["params"])
    step.optimizer.param_groups[0]["params"] = kept[1:]
    found = _losses(step, 2)
    step.model[0].requires_grad_(True)
    step.optimizer.add_param_group({"params": [step.model[0].weight]})
    return [*found, *_losses(step, 4)]


def test_a_weight_that_is_frozen_at_first(ranks: Ranks) -> None:
    expected = _thawed("")
    for found in ranks.run(_thawed, "data=2 zero=3", n=2):
        assert found == pytest.approx(expected, rel=1e-12)


UNFREEZING = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "adagrad": partial(Adagrad, lr=0.1),
}


def _unfrozen(name: str, frozen: slice, layout: str | None) -> list[float]:
    """Losses of a step that itself unfreezes layers at its third call; without a layout, in eager mode."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
    model[frozen].requires_grad_(False)  # type: ignore[union-attr]
    optimizer = UNFREEZING[name](model.parameters())
    count = {"calls": 0}

    def train_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        if count["calls"] == 2:
            model[frozen].requires_grad_(True)
        count["calls"] += 1
        loss = model(x).square().mean()
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        return loss.detach()

    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, dtype=torch.float64, generator=draw) for _ in range(CALLS)]
    if layout is None:
        return [float(train_step(model, optimizer, x)) for x in batches]
    step = tutti.distribute(train_step, model, optimizer, layout)
    return [float(step(x)) for x in batches]


FROZEN = {"the first": slice(0, 1), "all": slice(0, 3)}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", UNFREEZING)
def test_layers_that_the_step_unfreezes(ranks: Ranks, name: str, frozen: str) -> None:
    """A fused kernel of SGD takes momentum of all parameters, or makes that of all."""
    given = name, FROZEN[frozen]
    expected = _unfrozen(*given, None)
    assert _unfrozen(*given, "") == pytest.approx(expected, rel=1e-12)
    for found in ranks.run(_unfrozen, *given, "data=2 zero=3", n=2):
        assert found == pytest.approx(expected, rel=1e-10)


def _counted(layout: str) -> list[float]:
    """Counts that the optimizer keeps in Python go on where weights were whole for a while."""
    step = _made("roots", layout)
    found = _losses(step, 2)
    with step.whole(slots=True):
        pass
    step.state_dict()
    return [*found, *_losses(step, 3)]


def test_counts_go_on_after_a_block(ranks: Ranks) -> None:
    expected = _losses(_made("roots", ""), 5)
    assert _counted("") == pytest.approx(expected, rel=1e-12)
    for found in ranks.run(_counted, "data=2 zero=3", n=2):
        assert found == pytest.approx(expected, rel=1e-12)


class _WithPairs(torch.optim.Optimizer):
    """Two tensors in one slot, as SOAP keeps them; with `by_rate` they begin by the rate."""

    by_rate = False

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if not slots:
                    first = group["lr"] if self.by_rate else 1.0
                    slots["pair"] = [torch.full_like(p, first), torch.ones_like(p)]
                a, b = slots["pair"]
                slots["pair"] = [0.9 * a + p.grad.square(), 0.8 * b + p.grad.abs()]
                p.sub_(group["lr"] * p.grad / (a.sqrt() + b))


class _WithRates(_WithPairs):
    by_rate = True


@pytest.mark.parametrize(
    "kind", [torch.optim.ASGD, torch.optim.Rprop, _WithRates, _WithPairs, torch.optim.SGD]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_slots_that_begin_by_an_option_that_the_step_sets(
    kind: type[torch.optim.Optimizer], when: str
) -> None:
    """ASGD's `eta` and Rprop's `step_size` are the rate of then; SGD keeps none, a pair begins at 1."""

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if when == "before":
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05
        return loss

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return model, kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    model, optimizer = made()
    x, called = torch.ones(4, 4), tutti.distribute(step, model, optimizer)
    if when == "before" and kind not in (torch.optim.SGD, _WithPairs):
        with pytest.raises(
            CaptureError, match=f'sets "lr" before the first step of {kind.__name__}'
        ):
            called(x)
        return
    again, other = made()
    for _ in range(3):
        torch.testing.assert_close(called(x), step(again, other, x))
    torch.testing.assert_close([*model.parameters()], [*again.parameters()])
