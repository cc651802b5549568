"""What a step may be given and return: containers of all kinds, arguments by name, NumPy's numbers."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import SGD, Adam

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.capture.batch import Keywords, name_of, taken
from tutti.capture.forms import flattened
from tutti.errors import CaptureError


@dataclasses.dataclass
class Samples:
    x: Tensor
    y: Tensor
    name: str = "train"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    loss: Tensor
    predicted: Tensor
    name: str = "result"


class Encoding(UserDict):  # pyright: ignore[reportMissingTypeArgument]
    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Options(dict[str, Any]):
    pass


Pair = namedtuple("Pair", "loss none name")


def samples() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=made), torch.randn(8, 4, generator=made)


def trained(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    predicted = model(x)
    loss = F.mse_loss(predicted, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, predicted


def program(step: Any, *batch: Any) -> Program:
    model = nn.Linear(8, 4)
    return step, model, Adam(model.parameters(), lr=0.01), batch


def of_dataclasses() -> Program:
    def step(model: Any, optimizer: Any, b: Samples) -> Result:
        assert type(b) is Samples and b.name == "train"
        return Result(*trained(model, optimizer, b.x, b.y))

    return program(step, Samples(*samples()))


def of_encodings() -> Program:
    def step(model: Any, optimizer: Any, b: Encoding) -> Any:
        loss, predicted = trained(model, optimizer, b["x"], b.y)
        return Encoding({"loss": loss, "n": 3}), Options(predicted=predicted)

    x, y = samples()
    return program(step, Encoding({"x": x, "y": y}))


def of_objects() -> Program:
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        assert b.names == ["a", "b"]
        loss, _ = trained(model, optimizer, b.x, b.y)
        pair = Pair(loss, None, "named")
        return SimpleNamespace(pair=pair, seen={1, 2}, device=torch.device("cpu"), inner=[{}, b])

    x, y = samples()
    return program(step, SimpleNamespace(x=x, y=y, names=["a", "b"]))


def of_names() -> Program:
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        return trained(model, optimizer, **b)[0]

    x, y = samples()
    return program(step, {"y": y, "x": x})


def of_numbers() -> Program:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, scale: Any, n: Any) -> Any:
        return trained(model, optimizer, x * scale, y / n)[0]

    return program(step, *samples(), np.float32(0.5), np.int64(2))


CONTAINERS = [of_dataclasses, of_encodings, of_objects, of_names, of_numbers]


@pytest.mark.parametrize("made", CONTAINERS, ids=lambda p: p.__name__)
def test_containers_in_and_out(made: Any) -> None:
    assert_as_eager(made)


@pytest.mark.parametrize("made", [of_dataclasses, of_objects], ids=lambda p: p.__name__)
def test_two_ranks(ranks: Ranks, made: Any) -> None:
    assert_as_eager_on_ranks(ranks, made, "data=2 zero=3")


def test_results_are_of_the_types_that_the_step_returns() -> None:
    train_step, model, optimizer, (given,) = of_objects()
    step = tutti.distribute(train_step, model, optimizer)
    found = [step(given) for _ in range(2)]
    assert all(type(x) is SimpleNamespace and type(x.pair) is Pair for x in found)
    assert found[1].pair.name == "named" and found[1].pair.none is None
    assert found[1].seen == {1, 2} and found[1].device == torch.device("cpu")
    assert found[0].pair.loss > found[1].pair.loss
    torch.testing.assert_close(found[1].inner[1].x, given.x)


def test_arguments_by_name() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, *, target: Tensor, scale: float = 1.0) -> Any:
        return trained(model, optimizer, x, target * scale)[0]

    x, y = samples()
    train_step, model, optimizer, _ = program(step)
    played = tutti.distribute(train_step, model, optimizer)
    other = nn.Linear(8, 4)
    other.load_state_dict(model.state_dict())
    update = Adam(other.parameters(), lr=0.01)
    for scale in (0.5, 2.0):
        found = played(x, target=y, scale=scale)
        torch.testing.assert_close(found, step(other, update, x, target=y, scale=scale))
    assert played(scale=1.0, x=x, target=y).isfinite()
    given = {"x": x, "target": y, "scale": 0.5}
    assert tutti.verify(train_step, other, update, given, "data=2").ok
    assert tutti.verify(train_step, other, update, [x, Keywords(target=y)], "data=2").ok


def test_new_numbers_of_numpy_need_no_trace() -> None:
    train_step, model, optimizer, (x, y, *_) = of_numbers()
    step = tutti.distribute(train_step, model, optimizer)
    for scale in (0.5, 0.25, 0.125):
        step(x, y, np.float32(scale), 2)
    assert len(step._programs.known.by_key) == 1


def test_packed_sequences_are_no_constants() -> None:
    packed = pack_sequence([torch.ones(3, 8), torch.ones(2, 8)])
    leaves, _ = flattened(packed)
    assert leaves[0] is packed.data

    def step(model: Any, packed: PackedSequence) -> Tensor:
        return model(packed.data).sum()

    model = nn.Linear(8, 4)
    played = tutti.distribute(step, model, None)
    for factor in (1.0, 2.0):
        given = packed._replace(data=packed.data * factor)
        torch.testing.assert_close(played(given), step(model, given))


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (nn.Linear(2, 2), '"teacher"'),
        (SGD([torch.zeros(2)], lr=0.1), "as the optimizer"),
        (iter([1]), "for batch in loader"),
        (torch.utils.data.DataLoader([1, 2]), "for batch in loader"),  # type: ignore[arg-type]
    ],
)
def test_what_a_batch_may_not_hold(given: Any, fix: str) -> None:
    with pytest.raises(CaptureError, match="the batch holds a") as found:
        taken((torch.zeros(2), {"inner": [given]}))
    assert fix in found.value.fix
    with pytest.raises(CaptureError, match="the batch holds a"):
        tutti.verify(lambda m, x: m(x), nn.Linear(2, 2), None, (given,), "data=2")


@pytest.mark.parametrize(
    ("given", "fix"), [(np.ones(2), 'torch.as_tensor(x["inner"][0])'), ({1, 2}, "frozenset(x)")]
)
def test_what_a_step_may_not_read(given: Any, fix: str) -> None:
    def step(model: nn.Module, x: Any) -> Tensor:
        return model(x["x"]) * sum(x["inner"][0])

    batch = ({"x": torch.zeros(2, 2), "inner": [given]},)
    with pytest.raises(CaptureError, match=r'reads x\["inner"\]\[0\], a ') as found:
        tutti.verify(step, nn.Linear(2, 2), None, batch, "data=2")
    assert fix in found.value.fix and "sum(x[" in found.value.at


@pytest.mark.parametrize(
    "given", [torch.ones(1, 4), np.ones((1, 4)), "ab"], ids=["tensor", "array", "text"]
)
def test_a_single_argument_outside_a_sequence_is_refused(given: Any) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"fix +a tuple of the arguments, \(x,\)"):
        tutti.verify(lambda m, o, x: m(x).sum(), model, None, given, "data=1")


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    power: int = 2


def test_a_record_without_a_hash_is_its_values() -> None:
    def step(model: Any, x: Tensor, options: Settings) -> Tensor:
        return options.scale * model(x).sum() ** options.power

    model, x = nn.Linear(8, 4), samples()[0]
    played = tutti.distribute(step, model, None)
    for options in (Settings(), Settings(3.0), Settings(3.5, 3)):
        torch.testing.assert_close(played(x, options), step(model, x, options))


def test_modules_without_state_are_constants() -> None:
    assert taken((nn.MSELoss(), torch.zeros(2)))[1].shape == (2,)


def test_an_object_that_holds_itself_is_refused() -> None:
    round_trip = SimpleNamespace(x=torch.zeros(2))
    round_trip.me = [round_trip]
    with pytest.raises(CaptureError, match="and itself"):
        taken((round_trip,))


def test_a_generator_is_not_returned() -> None:
    def step(model: Any, x: Tensor) -> Any:
        return (model(row) for row in x)

    with pytest.raises(CaptureError, match="returns a generator"):
        tutti.distribute(step, nn.Linear(8, 4), None)(samples()[0])


def test_names_of_a_batchs_tensors() -> None:
    def step(model: Any, optimizer: Any, x: Any, pair: Any, *rest: Any, mask: Any = None) -> None:
        return None

    one = torch.zeros(())
    batch = taken((one, (one, {"y": one}), 3, one), {"mask": one, "length": 2})
    names = ["x", "pair[...]", "pair[...]", "rest[1]", "mask"]
    assert [name_of(step, 2, batch, k) for k in range(5)] == names
