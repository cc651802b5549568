"""Values that a step leaves in Python for its next call: in modules, classes, closures and objects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import losing
from ranks import Ranks
from tutti.capture.step import capture
from tutti.errors import CaptureError

CALLS = 4
Pair = collections.namedtuple("Pair", "tensor count")


@dataclasses.dataclass
class Box:
    """A user's object."""

    kept: Any = None


class Keeping(nn.Module):
    """Keeps something of one call for the next one, as `change` does it."""

    of_class: Any = None

    def __init__(self, start: Any, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.kept, self.change = nn.Linear(6, 4), start, change
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


def keeping(start: Any, change: Callable[[Any, Tensor], Tensor]) -> Program:
    return losing(Keeping(start, change), lambda model, x: model(x).square().mean())


def zeros() -> Tensor:
    return torch.zeros(8, 4)


def tensor_from_none() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y if model.kept is None else y + 0.5 * model.kept
        model.kept = y.detach()
        return y

    return keeping(None, change)


def _pair(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else y + 0.5 * model.kept[0] + model.kept[1]
    model.kept = (y.detach(), y.detach() * 0.1)
    return y


def tuple_from_none() -> Program:
    return keeping(None, _pair)


def tuple_from_tuple() -> Program:
    return keeping((zeros(), zeros()), _pair)


def states_of_an_lstm() -> Program:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.states = nn.LSTM(2, 4, batch_first=True), None

        def forward(self, x: Tensor) -> Tensor:
            y, states = self.lstm(x.view(8, 3, 2), self.states)
            self.states = tuple(s.detach() for s in states)
            return y

    return losing(Recurrent(), lambda model, x: model(x).square().mean())


def new_list() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y + 0.5 * model.kept[0] + model.kept[1]
        model.kept = [y.detach(), y.detach() * 0.1]
        return y

    return keeping([zeros(), zeros()], change)


def items_from_none() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        for i in range(2):
            y = y if model.kept[i] is None else y + 0.5 * model.kept[i][0]
            model.kept[i] = (y.detach(),)
        return y

    return keeping([None, None], change)


def new_dict() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y + 0.5 * model.kept["h"] if "h" in model.kept else y
        model.kept = {"h": y.detach()}
        return y

    return keeping({}, change)


def new_key() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y + 0.5 * model.kept["h"] if "h" in model.kept else y
        model.kept["h"] = y.detach()
        return y

    return keeping({}, change)


def named_tuple_with_a_count() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y + model.kept.tensor / (1 + model.kept.count)
        model.kept = Pair(y.detach(), model.kept.count + 1)
        return y

    return keeping(Pair(zeros(), 0), change)


def number_then_tensor() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        model.kept = model.kept + y.detach().abs().mean()
        return y * (1 + 0.1 * model.kept)

    return keeping(0.0, change)


def batch_before() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        before = y if model.kept is None else model.kept
        model.kept = y.detach()
        return y - 0.5 * before

    return keeping(None, change)


def attribute_of_a_class() -> Program:
    class Classed(Keeping):
        of_class = zeros()

    def change(model: Any, y: Tensor) -> Tensor:
        y = y + 0.5 * model.of_class
        type(model).of_class = y.detach()
        return y

    return losing(Classed(None, change), lambda model, x: model(x).square().mean())


def tensor_as_a_flag() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y if model.kept is None else 2 * y
        model.kept = y.detach()
        return y

    return keeping(None, change)


def count_beside_a_tensor() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        count = model.kept[1]
        model.kept = (y.detach(), count + 1)
        return y / (1 + count)

    return keeping((zeros(), 0), change)


def tuple_until_the_second_call() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y if model.kept is None else 2 * y
        model.kept = None
        return y

    return keeping((zeros(),), change)


def drawn_once() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        if model.kept is None:
            model.kept = torch.rand(4)
        return y * model.kept

    return keeping(None, change)


def for_inspection() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        model.kept, model.box, model.last = [y], Box(y), y
        return y

    return keeping([], change)


def constants_kept() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        if model.kept is None:
            positions = torch.arange(4).to(y)
            model.kept, model.box = (positions.cos(), positions.sin()), Box(positions)
        return y * model.kept[0] + y.flip(-1) * model.kept[1] + model.box.kept

    return keeping(None, change)


def list_of_one_call() -> Program:
    def change(model: Any, y: Tensor) -> Tensor:
        model.kept.clear()
        model.kept.append(y.abs().mean())
        return y * sum(model.kept)

    return keeping([], change)


class Own(torch.optim.Optimizer):
    """Moves each parameter against `direction(parameter, group, its state)`."""

    def __init__(self, params: Any, direction: Callable[..., Any], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.direction = direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.direction(p, group, self.state[p]), alpha=-group["lr"])


def by_optimizer(direction: Callable[..., Any], **options: Any) -> Program:
    model = nn.Linear(6, 4)
    optimizer = Own(model.parameters(), direction, **options)
    return losing(model, lambda model, x: model(x).square().mean(), optimizer)


def tuple_of_a_parameter() -> Program:
    def direction(p: Any, _: Any, state: dict[str, Any]) -> Tensor:
        mean, square = state.get("both", (torch.zeros_like(p), torch.zeros_like(p)))
        mean, square = 0.9 * mean + 0.1 * p.grad, 0.9 * square + 0.1 * p.grad**2
        state["both"] = (mean, square)
        return mean / (square.sqrt() + 1)

    return by_optimizer(direction)


def object_of_a_parameter() -> Program:
    def direction(p: Any, _: Any, state: dict[str, Any]) -> Tensor:
        box = state.setdefault("box", Box(torch.zeros_like(p)))
        box.kept = 0.9 * box.kept + p.grad
        return box.kept

    return by_optimizer(direction)


def nested_lists_of_a_parameter() -> Program:
    def direction(p: Any, _: Any, state: dict[str, Any]) -> Tensor:
        pairs = state.setdefault("pairs", [[torch.zeros_like(p)], [torch.zeros_like(p)]])
        pairs[0][0], pairs[1][0] = pairs[1][0], p.grad.clone()
        return pairs[0][0] + p.grad

    return by_optimizer(direction)


def tuple_of_a_group() -> Program:
    def direction(p: Any, group: dict[str, Any], _: Any) -> Tensor:
        average, count = group["seen"]
        group["seen"] = (0.9 * average + p.grad.norm(), count + 1)
        return p.grad / (1 + group["seen"][0] + 0.1 * count)

    return by_optimizer(direction, seen=(torch.zeros(()), 0))


OF_OPTIMIZERS = [
    *(tuple_of_a_parameter, object_of_a_parameter),
    *(nested_lists_of_a_parameter, tuple_of_a_group),
]
ON_RANKS = [
    *OF_OPTIMIZERS,
    tuple_from_none,
    states_of_an_lstm,
    items_from_none,
    named_tuple_with_a_count,
    number_then_tensor,
    attribute_of_a_class,
]
PLAYED = [
    *ON_RANKS,
    *(tensor_from_none, tuple_from_tuple, new_list, new_dict, new_key, batch_before),
    *(tensor_as_a_flag, count_beside_a_tensor, tuple_until_the_second_call),
    *(drawn_once, for_inspection, constants_kept, list_of_one_call),
]


@pytest.mark.parametrize("program", PLAYED, ids=lambda x: x.__name__)
def test_the_next_call_has_the_values(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=CALLS)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
@pytest.mark.parametrize("program", ON_RANKS, ids=lambda x: x.__name__)
def test_on_real_ranks(ranks: Ranks, program: Callable[[], Program], layout: str) -> None:
    assert_as_eager_on_ranks(ranks, program, layout, calls=CALLS)


def new_object(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else y + 0.5 * model.kept.kept
    model.kept = Box(y.detach())
    return y


def fraction(model: Any, y: Tensor) -> Tensor:
    model.kept = Fraction(1, 2) if model.kept is None else model.kept / 2
    return y * float(model.kept)


def array(model: Any, y: Tensor) -> Tensor:
    model.kept = np.ones(4) if model.kept is None else model.kept * 0.5
    return y * torch.from_numpy(model.kept).to(y)


def dtype_in_an_object(model: Any, y: Tensor) -> Tensor:
    y = y.to(torch.float16 if model.kept is None else model.kept.kept).to(y)
    model.kept = Box(torch.bfloat16)
    return y


def function(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else model.kept(y)
    model.kept = torch.sigmoid
    return y


def closure(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else model.kept(y)
    model.kept = lambda x: x + y.detach()
    return y


def grown_list(model: Any, y: Tensor) -> Tensor:
    model.kept = [*(model.kept or []), Box(len(model.kept or []))]
    return y * len(model.kept)


def module(model: Any, y: Tensor) -> Tensor:
    model.linear = nn.Linear(6, 4)
    return y


def parameter(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else y * model.kept[0].mean()
    model.kept = (model.linear.weight,)
    return y


def new_parameter(model: Any, y: Tensor) -> Tensor:
    model.tied = model.linear.weight
    return y * model.tied.mean()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (new_object, "puts a Box into kept, and its next call depends on it"),
        (fraction, "puts a Fraction into kept"),
        (dtype_in_an_object, "puts a Box into kept"),
        (array, "puts a ndarray into kept"),
        (function, "puts a builtin_function_or_method into kept"),
        (
            closure,
            r"puts a function into kept[\s\S]*test_left_values.py:\d+  model.kept = lambda x",
        ),
        (grown_list, "puts a list into kept"),
        (module, 'puts another module into "linear"'),
        (parameter, "keeps a parameter or a buffer in kept from one call to the next"),
        (new_parameter, 'puts another parameter into "tied"'),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_calls_cannot_leave_is_refused(change: Any, text: str) -> None:
    step, model, optimizer, batch = keeping(None, change)
    before, linear = dict(vars(model)), model.linear
    with pytest.raises(CaptureError, match=text):
        tutti.distribute(step, model, optimizer)(*batch)
    assert vars(model) == before and model.linear is linear
    assert [*dict(model.named_parameters())] == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize("start", [None, zeros(), (zeros(),)], ids=["none", "tensor", "tuple"])
def test_a_value_that_only_a_later_call_reads_is_refused(start: Any) -> None:
    def change(model: Any, y: Tensor) -> Tensor:
        model.count += 1
        if model.count > 2 and model.kept is not None:
            y = y + (model.kept[0] if isinstance(model.kept, tuple) else model.kept)
        model.kept = (y.detach(),) if isinstance(start, tuple) else y.detach()
        return y

    step, model, optimizer, batch = keeping(start, change)
    played = tutti.distribute(step, model, optimizer)
    for _ in range(2):
        played(*batch)
    with pytest.raises(tutti.TuttiError, match=r"kept is not kept after a call[\s\S]*0 \* kept"):
        played(*batch)


def test_a_generator_that_the_step_advances_is_refused() -> None:
    def sums() -> Any:
        total: Any = 0.0
        while True:
            total = total + (yield total)

    generator = sums()
    next(generator)
    step, model, optimizer, batch = keeping(None, lambda _, y: y + generator.send(y.detach()))
    with pytest.raises(CaptureError, match="takes the next of generator, a generator"):
        tutti.distribute(step, model, optimizer)(*batch)


@pytest.mark.parametrize("program", [for_inspection, constants_kept], ids=lambda x: x.__name__)
def test_what_no_call_reads_is_no_result(program: Callable[[], Program]) -> None:
    step, model, optimizer, batch = program()
    assert capture(step, model, optimizer, batch).effects == []


def test_a_function_that_each_call_makes_anew_may_be_left() -> None:
    held: dict[str, Any] = {"loss": None, "kinds": None}

    def change(model: Any, y: Tensor) -> Tensor:
        held["loss"], held["kinds"] = lambda: y * 2, [zeros, Box]
        model.kept = held["loss"]
        return model.kept() + held["loss"]()

    def program() -> Program:
        return keeping(None, change)

    with pytest.warns(
        UserWarning, match=r"held\['loss'\] stays as it is: the step puts a function"
    ):
        assert_as_eager(program, calls=CALLS)
    step, model, optimizer, batch = program()
    held["loss"] = None
    played = tutti.distribute(step, model, optimizer)
    for _ in range(3):
        played(*batch)
    assert held == {"loss": None, "kinds": [zeros, Box]} and model.kept is None
    assert played._num_traces <= 2


def test_a_function_of_a_module_is_left_for_the_next_call() -> None:
    def change(model: Any, y: Tensor) -> Tensor:
        y = y if model.kept is None else model.kept(y)
        model.kept = twice if model.kept is halved else halved
        return y

    assert_as_eager(lambda: keeping(None, change), calls=6)


def twice(x: Tensor) -> Tensor:
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_objects_that_no_call_reads_may_be_left() -> None:
    held: dict[str, Any] = {"box": None, "ratio": Fraction(1, 2)}

    def change(model: Any, y: Tensor) -> Tensor:
        held["box"], held["ratio"] = Box(y.detach()), held["ratio"] / 2
        return y

    step, model, optimizer, batch = keeping(None, change)
    with pytest.warns(UserWarning, match=r"held\['box'\] stays as it is: the step puts a Box"):
        tutti.distribute(step, model, optimizer)(*batch)
    assert held == {"box": None, "ratio": Fraction(1, 2)}
