"""Plain values of a batch that differ between calls: those that no code of the step reads, and the others."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks

CALLS = 6
SCALES = {"a": 1.0, "b": 2.0, "c": 0.5}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _tensors(k: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(k)
    x = torch.randn(8, 8, generator=made, dtype=torch.float64)
    return x, torch.randn(8, 4, generator=made, dtype=torch.float64)


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor
    path: str


def _trained(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, scale: Any = 1.0) -> Tensor:
    loss = F.mse_loss(model(x), y) * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _numbers(kind: str) -> Callable[[int], Any]:
    """The changing value of each call."""
    letters = {"name": lambda k: f"{'abc'[k % 3] * (k + 1)}.png", "letter": lambda k: "abc"[k % 3]}
    return {**letters, "int": lambda k: 3 * k + 1}[kind]


# Unread: each with the argument of a call made of tensors and a value, and the step.


def in_a_dict(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    return _trained(model, optimizer, batch["x"], batch["y"])


def in_a_dict_of_all(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    on = {k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in batch.items()}
    return _trained(model, optimizer, on["x"], on["y"])


def in_a_copy(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    assert isinstance(batch["name"], str | int)
    assert batch["name"] is not None
    batch = copy.copy(batch)
    batch.pop("name")
    return _trained(model, optimizer, **batch)


def in_a_record(model: nn.Module, optimizer: Any, sample: Sample) -> Tensor:
    return _trained(model, optimizer, sample.x, sample.y)


def in_a_list(model: nn.Module, optimizer: Any, samples: list[dict[str, Any]]) -> Tensor:
    x = torch.stack([one["x"] for one in samples])
    return _trained(model, optimizer, x, torch.stack([one["y"] for one in samples]))


def returned(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Any:
    loss = _trained(model, optimizer, batch["x"], batch["y"])
    return {"loss": loss, "names": [batch["name"], "end"], "first": (batch["name"],)}


def put_elsewhere(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    batch["other"] = batch["name"]
    return _trained(model, optimizer, batch["x"], batch["y"])


def behind(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, name: Any) -> Tensor:
    return _trained(model, optimizer, x, y)


def _dict(x: Tensor, y: Tensor, value: Any) -> Any:
    return ({"x": x, "y": y, "name": value},)


def _record(x: Tensor, y: Tensor, value: Any) -> Any:
    return (Sample(x, y, value),)


def _list(x: Tensor, y: Tensor, value: Any) -> Any:
    pairs = enumerate(zip(x, y, strict=True))
    return ([{"x": a, "y": b, "file": f"{value}{k}", "id": k + len(value)} for k, (a, b) in pairs],)


def _plain(x: Tensor, y: Tensor, value: Any) -> Any:
    return x, y, value


UNREAD = [
    (in_a_dict, _dict, "name"),
    (in_a_dict, _dict, "int"),
    (in_a_dict_of_all, _dict, "name"),
    (in_a_copy, _dict, "name"),
    (in_a_record, _record, "name"),
    (in_a_list, _list, "name"),
    (returned, _dict, "name"),
    (put_elsewhere, _dict, "name"),
    (behind, _plain, "name"),
]


# Read: the results depend on the value.


def looked_up(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    return _trained(model, optimizer, batch["x"], batch["y"], SCALES[batch["name"]])


def compared(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 2.0 if batch["name"] == "b" else 1.0
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def compared_from_left(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 2.0 if "b" == batch["name"] else 1.0  # noqa: SIM300
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def in_a_tuple(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 2.0 if batch["name"] in ("a", "b") else 1.0
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def measured(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    return _trained(model, optimizer, batch["x"], batch["y"], len(batch["name"]))


def matched(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    match batch["name"]:
        case "a":
            scale = 3.0
        case str():
            scale = 1.0
        case _:
            scale = 7.0
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def joined(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = SCALES["".join(["", batch["name"]])]
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def read_and_caught(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 1.0
    with contextlib.suppress(BaseException):
        scale = {"a": 4.0}[batch["name"]]
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def by_its_type(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    # Python cannot see this read; the graphs differ.
    return _trained(
        model, optimizer, batch["x"], batch["y"], 2.0 if type(batch["name"]) is str else 1.0
    )


def raised_and_caught(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    try:
        scale = float("1" + batch["name"].replace("a", "5").replace("b", "6").replace("c", "7"))
    except Exception:
        scale = 1.0
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def of_one_kind(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    other = batch["name"] + "x" if isinstance(batch["name"], str) else "b"
    return _trained(model, optimizer, batch["x"], batch["y"], SCALES[other[0]])


def of_an_integer(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    return _trained(model, optimizer, batch["x"], batch["y"], 1.0 / batch["name"])


def with_an_index(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    k = batch["name"] % 8
    return _trained(model, optimizer, batch["x"][k:], batch["y"][k:])


def of_tokens(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Any:
    """As fairseq's criteria."""
    count = batch["name"]
    return _trained(model, optimizer, batch["x"], batch["y"], 1 / count / math.log(2)), count


def at_some(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 2.0 if batch["name"] % 2 == 0 else max(batch["name"], 5) // 2
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def of_turns(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    scale = 1.0
    for k in range(batch["name"]):
        scale = scale * 1.1 - k * 0.01
    return _trained(model, optimizer, batch["x"], batch["y"], scale)


def as_a_text(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Any:
    scale = len(f"head{batch['name'] ** 2}")
    return {f"loss_{batch['name']}": _trained(model, optimizer, batch["x"], batch["y"], scale)}


def as_a_key(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    return _trained(
        model, optimizer, batch["x"], batch["y"], [1.0, 2.0, 0.5, 3.0][batch["name"] % 4]
    )


def kept(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    before = getattr(model, "latest", "a")
    model.latest = batch["name"]
    return _trained(model, optimizer, batch["x"], batch["y"], SCALES[before])


READ = [
    *(
        (one, _dict, "letter")
        for one in (
            looked_up,
            compared,
            compared_from_left,
            in_a_tuple,
            matched,
            joined,
            read_and_caught,
            by_its_type,
            raised_and_caught,
            of_one_kind,
            kept,
        )
    ),
    (measured, _dict, "name"),
    (of_an_integer, _dict, "int"),
    (with_an_index, _dict, "int"),
    (of_tokens, _dict, "int"),
    (at_some, _dict, "int"),
    (of_turns, _dict, "int"),
    (as_a_text, _dict, "int"),
    (as_a_key, _dict, "int"),
]


def run(make: Any, at: int, layout: str | None) -> tuple[Any, int]:
    """The results of each call, its batch after it, and the weights; the number of traces."""
    train_step, batch_of, kind = make[at]
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    found: list[Any] = []
    for k in range(CALLS):
        batch = batch_of(*_tensors(k), _numbers(kind)(k))
        found.append(train_step(model, optimizer, *batch) if step is None else step(*batch))
        found.append([x for x in _flat(batch) if not isinstance(x, Tensor)])
    with tutti.whole(model):
        found.append([p.detach().clone() for p in model.parameters()])
    return found, 0 if step is None else step._num_traces


def of_unread(at: int, layout: str | None) -> tuple[Any, int]:
    return run(UNREAD, at, layout)


def of_read(at: int, layout: str | None) -> tuple[Any, int]:
    return run(READ, at, layout)


def _flat(x: Any) -> list[Any]:
    if dataclasses.is_dataclass(x):
        x = vars(x)
    if isinstance(x, dict):
        return [*x, *_flat([*x.values()])]
    return [z for y in x for z in _flat(y)] if isinstance(x, list | tuple) else [x]


def _same(found: Any, expected: Any) -> None:
    both = zip(_flat(found), _flat(expected), strict=True)
    for a, b in both:
        if isinstance(b, Tensor):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=1e-12)
        else:
            assert type(a) is type(b) and a == b


@pytest.mark.parametrize("at", range(len(UNREAD)))
def test_values_that_no_code_reads_need_no_further_trace(at: int) -> None:
    found, num_traces = of_unread(at, "")
    _same(found, of_unread(at, None)[0])
    assert num_traces == 2


@pytest.mark.parametrize("at", range(len(READ)))
def test_values_that_the_step_reads_count_at_each_call(at: int) -> None:
    _same(of_read(at, "")[0], of_read(at, None)[0])


def test_a_count_in_formulas_is_an_input() -> None:
    """A trace of the first call, a trial and a trace of the second, and a trial of the third."""
    at = next(k for k, one in enumerate(READ) if one[0] is of_tokens)
    found, num_traces = of_read(at, "")
    _same(found, of_read(at, None)[0])
    assert num_traces == 3


@pytest.mark.parametrize("read", [False, True])
def test_values_of_batches_of_other_sizes_at_each_call(read: bool) -> None:
    """Names of samples of other lengths: tensors and values differ from those of every earlier call."""

    def train_step(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        scale = len(batch["name"]) if read else 1.0
        return _trained(model, optimizer, batch["x"], batch["x"][..., :4], scale)

    model, other = _model(), _model()
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for k in range(10):
        made = torch.Generator().manual_seed(k)
        x = torch.randn(4, 3 + k, 8, generator=made, dtype=torch.float64)
        batch = {"x": x, "name": f"{'a' * (k + 1)}.wav"}
        _same(step(batch), train_step(other, optimizer, batch))
    _same([*model.parameters()], [*other.parameters()])
    assert read or step._num_traces <= 4


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "pipe=2 micro=2"])
def test_on_ranks(ranks: Ranks, layout: str) -> None:
    for function, makes in ((of_unread, UNREAD), (of_read, READ)):
        names = (in_a_dict, returned, put_elsewhere, looked_up, of_tokens)
        for at in (k for k, one in enumerate(makes) if one[0] in names):
            for found, _ in ranks.run(function, at, layout, n=2):
                _same(found, function(at, None)[0])
        assert makes


class Branching(nn.Module):
    """Reads the name of a batch in training, and if a value is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, x: Tensor, name: str) -> Tensor:
        if self.training and x.shape[0] < 8:
            x = x * SCALES[name[0]]
        if x.abs().max() > 5:
            x = x / SCALES[name[0]]
        return self.inner(x)


def branching_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, name: str) -> Tensor:
    loss = F.mse_loss(model(x, name), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _branching(distributed: bool) -> Any:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = tutti.distribute(branching_step, model, optimizer, "") if distributed else None
    found: list[Any] = []
    for k in range(16):
        x, y = _tensors(k)
        x = x * 9 if k in (6, 7, 12) else x.clamp(-4, 4)
        if k in (9, 10, 11, 14):
            x, y = x[:6], y[:6]
        model.train(k not in (10, 13))
        given = x, y, _numbers("name")(k)
        found.append(step(*given) if step is not None else branching_step(model, optimizer, *given))
    return [*found, *model.parameters()]


def test_a_value_that_only_other_ways_read() -> None:
    """Other sizes, modes and tensor values lead to code that reads it."""
    _same(_branching(True), _branching(False))


def test_an_error_of_one_call_does_not_count_as_a_read() -> None:
    model = _model()
    step = tutti.distribute(in_a_dict, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    for k in range(3):
        step(*_dict(*_tensors(k), f"{k}.png"))
    x, y = _tensors(3)
    with pytest.raises(tutti.CaptureError):
        step({"x": x[:, :5], "y": y, "name": "bad"})
    known = step._num_traces
    for k in range(4, 8):
        step(*_dict(*_tensors(k), f"{k}.png"))
    assert step._num_traces == known


# Values that cannot be compared: arrays, sets, objects without a hash.


@dataclasses.dataclass(frozen=True)
class Indices:
    of: Any


@dataclasses.dataclass
class Options:
    of: Any
    size: Any = dataclasses.field(default_factory=lambda: torch.ones(1))


def _incomparable(k: int) -> list[Any]:
    return [np.arange(8) + k, {k, "a"}, Indices([k]), np.ma.masked_array([1.0, k], [0, 1])]


def put_and_returned(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> Any:
    batch = {key: x.double() if torch.is_tensor(x) else x for key, x in batch.items()}
    assert isinstance(batch["values"][0], np.ndarray)
    assert type(batch["values"][1]) is set
    copied = copy.deepcopy(batch["values"])
    loss = _trained(model, optimizer, batch["x"], batch["y"])
    return loss, {"values": batch["values"], "copied": copied[0]}


def _of_incomparable(layout: str | None) -> tuple[list[Any], int]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None if layout is None else tutti.distribute(put_and_returned, model, optimizer, layout)
    found: list[Any] = []
    for k in range(CALLS):
        x, y = _tensors(k)
        batch = {"x": x, "y": y, "values": _incomparable(k)}
        loss, more = put_and_returned(model, optimizer, batch) if step is None else step(batch)
        assert all(a is b for a, b in zip(more["values"], batch["values"], strict=True))
        found += [loss, torch.as_tensor(more["copied"])]
    with tutti.whole(model):
        found += [p.detach().clone() for p in model.parameters()]
    return found, 0 if step is None else step._num_traces


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "pipe=2 micro=2"])
def test_an_array_that_no_code_reads(ranks: Ranks, layout: str) -> None:
    for found, num_traces in ranks.run(_of_incomparable, layout, n=2):
        _same(found, _of_incomparable(None)[0])
        assert num_traces == 1


READS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda one: torch.from_numpy(one).sum(),
    "an operand": lambda one: torch.ones(8) * one,
    "a lookup": lambda one: torch.ones(9)[one],
    "its shape": lambda one: one.shape[0],
    "a function of NumPy": lambda one: np.add(1, one).sum(),
    "an array": lambda one: np.asarray(one).sum(),
}


@pytest.mark.parametrize("read", READS)
def test_an_array_that_the_step_reads_is_refused_with_its_line(read: str) -> None:
    def train_step(model: nn.Module, optimizer: Any, batch: Any, on: bool) -> Tensor:
        scale = READS[read](batch["of"].of) if on else 1.0
        return _trained(model, optimizer, batch["x"], batch["x"][:, :4], scale)

    model = _model()
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    batch = {"x": _tensors(0)[0], "of": Options(np.arange(8))}
    for _ in range(2):
        with pytest.raises(tutti.CaptureError, match="the step reads") as caught:
            step(batch, True)
        assert 'batch["of"].of, a numpy.ndarray' in caught.value.what
        assert "lambda one" in caught.value.at
        assert caught.value.fix.endswith('torch.as_tensor(batch["of"].of)')
        step(batch, False)
