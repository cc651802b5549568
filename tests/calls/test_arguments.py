"""Arguments that a step changes in Python: logs, counters, meters, averages of weights, parts of a batch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections import ChainMap, UserDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import tutti
from ranks import Ranks
from tutti.errors import CaptureError

CALLS = 4


class Meter:
    """A mean over calls."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count


class Averaged:
    """A moving average of weights; in place, or by other tensors."""

    def __init__(self, model: nn.Module, *, in_place: bool) -> None:
        self.in_place, self.updates = in_place, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            if self.in_place:
                self.weights[name].mul_(0.9).add_(p, alpha=0.1)
            else:
                self.weights[name] = 0.9 * self.weights[name] + 0.1 * p.detach()


class Weighted:
    """A loss with an attribute that the script changes."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, predicted: Tensor, y: Tensor) -> Tensor:
        return self.scale * F.mse_loss(predicted, y)


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    count: int = 0


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _batch(k: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(k)
    x = torch.randn(8, 8, generator=made, dtype=torch.float64)
    return x, torch.randn(8, 4, generator=made, dtype=torch.float64)


def _updated(model: Any, optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _fit(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    return _updated(model, optimizer, F.mse_loss(model(x), y))


def logs(model: Any, optimizer: Any, x: Tensor, y: Tensor, log: dict[str, Any]) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    log.update(loss=loss.item())
    log["calls"] = log.get("calls", 0) + 1
    return loss * log["calls"]


def appends(model: Any, optimizer: Any, x: Tensor, y: Tensor, losses: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    losses.append(loss.detach())
    return loss


def appends_by_name(model: Any, optimizer: Any, x: Tensor, y: Tensor, losses: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    losses["loss"].append(loss.item())
    return loss


def averages(model: Any, optimizer: Any, x: Tensor, y: Tensor, state: dict[str, Any]) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    state["mean"] = 0.9 * state["mean"] + 0.1 * loss.detach() if "mean" in state else loss.detach()
    return loss


def measures(model: Any, optimizer: Any, x: Tensor, y: Tensor, meter: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    meter.update(loss.item(), x.size(0))
    return loss


def follows(model: Any, optimizer: Any, x: Tensor, y: Tensor, average: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    average.update(model)
    return loss


def schedules(model: Any, optimizer: Any, x: Tensor, y: Tensor, scheduler: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    scheduler.step()
    return loss


def scales(model: Any, optimizer: Any, x: Tensor, y: Tensor, scaler: Any) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def counts(model: Any, optimizer: Any, x: Tensor, y: Tensor, settings: Settings) -> Tensor:
    settings.count += 1
    loss = settings.scale * settings.count * F.mse_loss(model(x), y)
    return _updated(model, optimizer, loss)


def weighs(model: Any, optimizer: Any, x: Tensor, y: Tensor, loss: Any) -> Tensor:
    return _updated(model, optimizer, loss(model(x), y))


def remembers(model: Any, optimizer: Any, x: Tensor, y: Tensor, state: Any) -> Tensor:
    hidden = torch.tanh(model(x) + state["hidden"])
    state["hidden"] = hidden.detach()
    return _updated(model, optimizer, F.mse_loss(hidden, y))


def configured(model: Any, optimizer: Any, x: Tensor, y: Tensor, options: Any) -> Tensor:
    loss = options.loss(model(x), y) * options.scale * options.inner["weight"]
    return _updated(model, optimizer, loss)


def _options(model: Any, optimizer: Any) -> Any:
    """Without a hash."""
    return argparse.Namespace(scale=1.5, loss=F.mse_loss, inner={"weight": 0.5}, path=Path("/"))


class Tools:
    """A trainer, with its model and a tensor of its own."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.weight, self.meter = torch.tensor(0.5), Meter()
        self.last: Any = None


def trains(model: Any, optimizer: Any, x: Tensor, y: Tensor, tools: Any) -> Tensor:
    loss = F.mse_loss(tools.model(x), y) * tools.weight
    tools.last = _updated(model, tools.optimizer, loss).detach()
    tools.meter.update(tools.last.item())
    return loss


def uses_both(model: Any, optimizer: Any, x: Tensor, y: Tensor, tools: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    tools["average"].update(model)
    tools["meter"].update(loss.item())
    return loss


def adds(model: Any, optimizer: Any, x: Tensor, y: Tensor, totals: Any) -> Tensor:
    loss = _fit(model, optimizer, x, y)
    totals["loss"] += loss.detach()
    return loss


def _values(x: Any) -> Any:
    """Numbers to compare in an argument."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, nn.Module | torch.optim.Optimizer):
        return None
    if isinstance(x, dict | UserDict | ChainMap):
        return {key: _values(value) for key, value in x.items()}
    if isinstance(x, list | deque):
        return [_values(one) for one in x]
    if isinstance(x, StepLR | torch.amp.GradScaler):
        return _values({k: v for k, v in x.state_dict().items() if not k.startswith("_")})
    return _values(vars(x)) if hasattr(x, "__dict__") else x


def _later_scale(loss: Any) -> None:
    loss.scale += 0.5


CASES: dict[str, tuple[Any, Callable[[Any, Any], Any], Any]] = {
    "dict": (logs, lambda m, o: {}, None),
    "list": (appends, lambda m, o: [], None),
    "deque": (appends, lambda m, o: deque(maxlen=2), None),
    "lists by name": (appends_by_name, lambda m, o: defaultdict(list), None),
    "tensors": (averages, lambda m, o: {}, None),
    "meter": (measures, lambda m, o: Meter(), None),
    "weights": (follows, lambda m, o: Averaged(m, in_place=False), None),
    "weights in place": (follows, lambda m, o: Averaged(m, in_place=True), None),
    "hidden state": (remembers, lambda m, o: {"hidden": torch.zeros(8, 4).double()}, None),
    "options": (configured, _options, _later_scale),
    "dict in an object": (logs, lambda m, o: UserDict(), None),
    "dicts": (logs, lambda m, o: ChainMap({}, {"other": 1}), None),
    "trainer": (trains, Tools, None),
    "average and meter": (
        uses_both,
        lambda m, o: {"average": Averaged(m, in_place=True), "meter": Meter()},
        None,
    ),
    "sum": (adds, lambda m, o: {"loss": torch.zeros(()).double()}, None),
    "scheduler": (schedules, lambda m, o: StepLR(o, 2, 0.5), None),
    "scaler": (scales, lambda m, o: torch.amp.GradScaler("cpu", 4.0, growth_interval=2), None),
    "record": (counts, lambda m, o: Settings(), _later_scale),
    "loss": (weighs, lambda m, o: Weighted(), _later_scale),
    "function": (weighs, lambda m, o: F.l1_loss, None),
    "partial": (weighs, lambda m, o: functools.partial(F.huber_loss, delta=0.5), None),
    "module": (weighs, lambda m, o: nn.SmoothL1Loss(), None),
}
OPTIMIZERS = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.01),
    "SGD": lambda weights: torch.optim.SGD(
        weights, lr=0.1, momentum=0.9
    ),  # its first call is eager
}


def trained(case: str, optimizer: str, layout: str | None) -> list[Any]:
    """The losses and the argument after each call, and the weights at the end."""
    train_step, make, later = CASES[case]
    model = _model()
    own: Any = OPTIMIZERS[optimizer](model.parameters())
    argument = make(model, own)
    if layout is None:
        step = functools.partial(train_step, model, own)
    else:
        step = tutti.distribute(train_step, model, own, layout=layout)
    found: list[Any] = []
    for k in range(CALLS):
        found += [float(step(*_batch(k), argument)), _values(argument)]
        if later is not None:
            later(argument)
    with tutti.whole(model):
        return [*found, _values(dict(model.named_parameters()))]


def _assert_same(made: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert made.keys() == expected.keys()
        made, expected = [*made.values()], [*expected.values()]
    if isinstance(expected, list | tuple):
        assert len(made) == len(expected)
        for a, b in zip(made, expected, strict=True):
            _assert_same(a, b)
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(
            torch.as_tensor(made), torch.as_tensor(expected), rtol=1e-11, atol=1e-12
        )
    else:
        assert made == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_one_device_changes_them_as_plain_pytorch(case: str, optimizer: str) -> None:
    _assert_same(trained(case, optimizer, "data=1"), trained(case, optimizer, None))


@pytest.mark.parametrize("layout", ["data=2 zero=3 micro=2", "pipe=2 micro=2"])
def test_every_rank_changes_its_own(ranks: Ranks, layout: str) -> None:
    for case in CASES:
        expected = trained(case, "Adam", None)
        for made in ranks.run(trained, case, "Adam", layout, n=2):
            _assert_same(made, expected)


def test_another_object_at_each_call_gets_the_changes_of_its_call() -> None:
    model = _model()
    step = tutti.distribute(logs, model, torch.optim.Adam(model.parameters(), lr=0.01))
    given: list[dict[str, Any]] = [{} for _ in range(CALLS)]
    losses = [float(step(*_batch(k), log)) for k, log in enumerate(given)]
    assert [log["loss"] for log in given] == losses
    assert [log["calls"] for log in given] == [1] * CALLS
    assert step._num_traces <= 3


def test_an_argument_by_name() -> None:
    def fit(model: Any, optimizer: Any, x: Tensor, y: Tensor, *, log: Any = None) -> Tensor:
        loss = _fit(model, optimizer, x, y)
        if log is not None:
            log["loss"] = loss.item()
        return loss

    model, log = _model(), dict[str, Any]()
    step = tutti.distribute(fit, model, torch.optim.Adam(model.parameters(), lr=0.01))
    for k in range(CALLS):
        named = {"log": log} if k % 2 else {}
        before = dict(log)
        loss = float(step(*_batch(k), **named))
        assert log == ({"loss": loss} if named else before)


def test_verify_leaves_them_as_they_are() -> None:
    for case in CASES:
        train_step, make, _ = CASES[case]
        model = _model()
        own = torch.optim.Adam(model.parameters(), lr=0.01)
        argument = make(model, own)
        before = _values(argument)
        verdict = tutti.verify(train_step, model, own, (*_batch(0), argument), "data=2 zero=3")
        assert verdict.ok, (case, str(verdict))
        _assert_same(_values(argument), before)


# Counts of batches and steps


def anneals(model: Any, optimizer: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    weight = min(1.0, (step + 1) / 3) * math.cos(step / 7) * float(step + 1)
    return _updated(model, optimizer, F.mse_loss(model(x), y) * weight)


def branches(model: Any, optimizer: Any, x: Tensor, y: Tensor, index: int) -> tuple[Tensor, int]:
    loss = F.mse_loss(model(x), y) * (2.0 if index % 3 == 0 else 1.0)
    return _updated(model, optimizer, loss), index + 1


def crops(model: Any, optimizer: Any, x: Tensor, y: Tensor, length: int) -> Tensor:
    loss = F.mse_loss(model(x), y) + x[:, : length % 3 + 1].sum()
    return _updated(model, optimizer, loss)


def counted(name: str, layout: str | None) -> tuple[list[Any], int]:
    """What six calls return, and the number of traces."""
    train_step = {"anneals": anneals, "branches": branches, "crops": crops}[name]
    model = _model()
    own = torch.optim.Adam(model.parameters(), lr=0.01)
    if layout is None:
        return [train_step(model, own, *_batch(k), k) for k in range(6)], 0
    step = tutti.distribute(train_step, model, own, layout=layout)
    return [step(*_batch(k), k) for k in range(6)], step._num_traces


@pytest.mark.parametrize(("name", "traces"), [("anneals", 3), ("branches", 3), ("crops", 6)])
def test_an_integer_that_changes_is_an_input(ranks: Ranks, name: str, traces: int) -> None:
    expected, _ = counted(name, None)
    for layout in ("data=1", "data=2 micro=2"):
        found = ranks.run(counted, name, layout, n=2) if "2" in layout else [counted(name, layout)]
        for made, count in found:
            _assert_same(made, expected)
            assert count <= traces


# Containers that hold tensors


SEEN: dict[str, Any] = {"count": 0, "losses": [], "scale": 1.0}


@dataclasses.dataclass
class Sample:
    """A batch with a method that reads and changes a global."""

    x: Tensor

    def loss(self, model: Any) -> Tensor:
        SEEN["count"] += 1
        loss = model(self.x).square().mean() * SEEN["count"] * SEEN["scale"]
        SEEN["losses"].append(loss.item())
        return loss


def by_method(model: Any, batch: Sample) -> Tensor:
    return batch.loss(model)


def test_a_method_of_a_batch_changes_a_global() -> None:
    model = _model()

    def calls(step: Any) -> list[Any]:
        SEEN.update(count=0, losses=[], scale=1.0)
        found = []
        for k in range(4):
            found += [float(step(Sample(_batch(k)[0]))), _values(SEEN)]
            SEEN["scale"] += 0.5
        return found

    made = calls(tutti.distribute(by_method, model, None))
    _assert_same(made, calls(lambda batch: by_method(model, batch)))


def takes(model: Any, batch: dict[str, Any]) -> Tensor:
    factor = 2.0 if batch.pop("first", False) else 1.0
    return model(batch["x"]).sum() * factor


def test_what_a_step_removes_from_a_batch_is_gone() -> None:
    model, mine, expected = _model(), _container() | {"first": True}, _container() | {"first": True}
    step = tutti.distribute(takes, model, None)
    for _ in range(3):
        torch.testing.assert_close(float(step(mine)), float(takes(model, expected)))
        assert mine.keys() == expected.keys()


def counts_in_batch(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["seen"] = batch.get("seen", 0) + 1
    batch["names"].append("again")
    return model(batch["x"]).sum() * batch["seen"] * len(batch["names"])


def adds_labels(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["y"] = batch["x"][:, :4].clone()
    batch["x"] = batch["x"].float().double()
    return (model(batch["x"]) - batch["y"]).sum()


def halves(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] / 2
    return model(batch["x"]).sum()


def collects(model: Any, batch: dict[str, Any]) -> Tensor:
    loss = model(batch["x"]).sum()
    batch["names"].append(loss.detach())
    return loss


def replaces_a_pair(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["pairs"][0] = (batch["pairs"][0][0] + 1, "again")
    return model(batch["x"]).sum() * batch["pairs"][0][0]


def replaces_a_dict(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["inner"] = {"count": batch["inner"]["count"] + 1}
    return model(batch["x"]).sum() * batch["inner"]["count"]


def _container() -> dict[str, Any]:
    inner = {"count": 1, "other": 2}
    return {"x": _batch(0)[0], "names": ["first"], "pairs": [(1, "first")], "inner": inner}


@pytest.mark.parametrize("train_step", [counts_in_batch, adds_labels])
def test_the_same_container_again(train_step: Any) -> None:
    model, mine, expected = _model(), _container(), _container()
    step = tutti.distribute(train_step, model, None)
    for _ in range(3):
        loss = float(train_step(model, expected))
        torch.testing.assert_close(float(step(mine)), loss, rtol=1e-6, atol=1e-6)
        assert mine.get("seen") == expected.get("seen") and mine["names"] == expected["names"]


@pytest.mark.parametrize("train_step", [halves, collects, replaces_a_pair, replaces_a_dict])
def test_a_container_whose_tensors_the_step_has_changed_comes_once(train_step: Any) -> None:
    model, given = _model(), _container()
    step = tutti.distribute(train_step, model, None)
    for _ in range(2):
        expected = float(train_step(model, _container()))
        torch.testing.assert_close(float(step(_container())), expected)
    inner = given["inner"]
    step(given)
    assert inner == {"count": 1, "other": 2}  # the caller may have it elsewhere
    with pytest.raises(CaptureError, match="has changed its argument batch, and gets the same"):
        step(given)
    step(_container())
