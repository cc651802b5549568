"""What cannot be captured is refused with what, the user's line, why, and a way out."""

from __future__ import annotations

import contextvars
import copy
import io
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Optimizer

from small_steps import trained
from tutti.capture.step import capture
from tutti.errors import CaptureError
from zoo_models import MLP
from zoo_steps import cross_entropy, vector_batch

Step = Callable[..., Any]


def update(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def writing_text(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = update(model, optimizer, cross_entropy(model(x), y))
    print(f"loss {loss.item():.3f}")  # text here
    return loss


def sizing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    rows = (y >= 0).sum().item()  # size here
    return update(model, optimizer, cross_entropy(model(x[:rows]), y[:rows]))


def sizing_later(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    if y.sum() > 0:  # a branch is no size
        x = 2 * x
    rows = 2 + (y >= 0).sum().item()  # later size here
    return update(model, optimizer, cross_entropy(model(x[2:rows]), y[2:rows]))


def rolling(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    first = y.argmax().item()  # shift here
    return update(model, optimizer, cross_entropy(model(x.roll(-first, 1)), y))


def queueing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    start = int((y == 0).sum() * 0)  # slice here
    x[:, start : start + 2] = 1.0
    return update(model, optimizer, cross_entropy(model(x), y))


def converting(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = int(x.abs().max())  # int here
    return update(model, optimizer, cross_entropy(model(x / scale), y))


def selecting(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    rows = (y >= 0).nonzero()  # nonzero here
    return update(model, optimizer, cross_entropy(model(x[rows[:, 0]]), y[rows[:, 0]]))


def masking(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)[y >= 0]  # mask here
    return update(model, optimizer, logits.square().mean())


def grouping(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones(2, x.shape[1], x.shape[1])
    ends = torch.stack([(y == 0).sum(), torch.tensor(len(y))]).int()
    x = torch._grouped_mm(x, weights, offs=ends)  # group here
    return update(model, optimizer, cross_entropy(model(x), y))


def packing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    packed = pack_padded_sequence(x[:, None], torch.ones(len(y)))  # pack here
    return update(model, optimizer, cross_entropy(model(packed.data), y))


def accumulating(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model(x), y)
    loss.backward()  # accumulate here
    optimizer.step()
    return loss


def writing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)
    return update(model, optimizer, cross_entropy(model(x), y))


WAYS_OUT: dict[str, tuple[Step, str, str, str]] = {
    "text": (writing_text, "value into a text", "# text here", "return the tensor"),
    "size": (sizing, "makes a size of a tensor's value", "# size here", "mask"),
    "later size": (
        *(sizing_later, "makes a size of a tensor's value"),
        *("# later size here", "mask"),
    ),
    "shift": (
        *(rolling, "a position or a bound for aten.roll.default of a tensor's value"),
        *("# shift here", "torch.gather"),
    ),
    "slice": (
        *(queueing, "a position or a bound for aten.slice.Tensor of a tensor's value"),
        *("# slice here", "x[:, at] in place of x[:, p : p + count]"),
    ),
    "int": (converting, "makes a plain number", "# int here", "x.long().item()"),
    "nonzero": (selecting, "nonzero", "# nonzero here", "torch.where"),
    "mask": (masking, "shape that depends on values", "# mask here", "torch.where"),
    "group": (grouping, "groups of rows", "# group here", "batched_mm"),
    "pack": (packing, "shape that depends on values", "# pack here", "lengths - 1"),
    "accumulate": (
        *(accumulating, "gradients that an earlier call left"),
        *("# accumulate here", "zero_grad"),
    ),
}


def refused(step: Step, optimizer: Callable[..., Optimizer] | None = None) -> CaptureError:
    torch.manual_seed(0)
    model = MLP()
    made = (optimizer or (lambda p: SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    before = copy.deepcopy((model.state_dict(), made.state_dict()["param_groups"]))
    with pytest.raises(CaptureError) as caught:
        capture(step, model, made, vector_batch(0))
    # The failed trace left nothing behind.
    assert all(x.equal(before[0][n]) for n, x in model.state_dict().items())
    assert made.state_dict()["param_groups"] == before[1]
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    return caught.value


@pytest.mark.parametrize("name", WAYS_OUT)
def test_an_error_says_what_where_why_and_fix(name: str) -> None:
    step, what, line, fix = WAYS_OUT[name]
    error = refused(step)
    assert what in error.what
    assert line in error.at and "test_errors.py:" in error.at
    assert error.why and fix in error.fix
    assert [x.split()[0] for x in str(error).splitlines()[1:]] == ["at", "why", "fix"]


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("Python's random", lambda: random.sample(range(4), 2)[0]),
        ("numpy.random", lambda: float(np.random.permutation(4)[0])),
        ("MADE", lambda: float(MADE.normal(size=3)[0])),
        ("Python's random", lambda: random.seed(3) or 1.0),
    ],
    ids=["sample", "permutation", "of the script", "seed"],
)
def test_orders_and_arrays_drawn_on_the_host(name: str, draw: Callable[[], float]) -> None:
    """They would be the same at every call."""
    before = random.getstate(), str(np.random.get_state()), MADE.bit_generator.state
    step = trained(lambda model, x, y: draw() * cross_entropy(model(x), y))
    error = refused(step)
    assert error.what == f"the step draws random numbers from {name}"
    assert "test_errors.py:" in error.at
    assert "torch.rand" in error.fix
    assert before == (random.getstate(), str(np.random.get_state()), MADE.bit_generator.state)


MADE = np.random.default_rng(0)
THREAD = threading.local()
CONTEXT = contextvars.ContextVar("CONTEXT", default=0)
FILE = io.StringIO("1\n2\n")
QUEUE: queue.Queue[float] = queue.Queue()


def count_in_thread() -> float:
    THREAD.count = getattr(THREAD, "count", 0) + 1
    return THREAD.count


def count_in_context() -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


@pytest.mark.parametrize(
    ("name", "take"),
    [
        ("THREAD", count_in_thread),
        ("CONTEXT", count_in_context),
        ("FILE", lambda: float(FILE.readline())),
        ("QUEUE", lambda: QUEUE.get()),
    ],
)
def test_what_a_step_takes_in_python(name: str, take: Callable[[], float]) -> None:
    QUEUE.put(2.0)
    step = trained(lambda model, x, y: take() * cross_entropy(model(x), y))
    assert refused(step).what == f"the step changes {name}, in Python"


def test_a_random_number_outside_of_torch() -> None:
    """NumPy computes a plain number of it."""
    step = trained(
        lambda model, x, y: np.sqrt(random.random()) * cross_entropy(model(x), y)
    )  # here
    error = refused(step)
    assert error.what.startswith("the step reads a random number, of Python's random: random")
    assert "np.sqrt(random.random())" in error.at and "before the step" in error.fix


def test_a_generator_of_its_own_does_not_matter() -> None:
    model = MLP()
    step = trained(lambda model, x, y: random.Random(0).random() * cross_entropy(model(x), y))
    capture(step, model, SGD(model.parameters(), lr=0.1), vector_batch(0))


def test_writing_into_the_batch() -> None:
    error = refused(writing)
    assert error.what == "the step writes into its argument x"
    assert error.at.endswith("x.mul_(0.5)") and "test_errors.py" in error.at
    assert "x = x.clone()" in error.fix and "x.div(255) in place of x.div_(255)" in error.fix


def test_writing_into_state_kept_by_hand() -> None:
    """A clone would lose it at each call."""

    def step(
        model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, kept: dict[str, Any]
    ) -> Tensor:
        kept["mean"].mul_(0.9)  # here
        return update(model, optimizer, cross_entropy(model(x), y))

    model, kept = MLP(), {"mean": torch.ones(3)}
    with pytest.raises(CaptureError) as info:
        capture(step, model, SGD(model.parameters(), lr=0.1), (*vector_batch(0), kept))
    error = info.value
    assert error.what == "the step writes into its argument kept[...]"
    assert error.at.endswith("# here")
    assert "an object of your own class" in error.fix and "optimizer.state[p]" in error.fix


def test_a_parameter_for_an_optimizer_that_is_none() -> None:
    def step(model: nn.Module, optimizer: Optimizer | None, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    with pytest.raises(CaptureError) as info:
        capture(step, MLP(), None, vector_batch(0))
    error = info.value
    assert "missing 1 required positional argument: 'y'" in error.what
    assert "with optimizer=None the step is called without one" in error.why
    assert "after the model" in error.fix


def test_an_optimizer_of_another_model() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return update(model, optimizer, cross_entropy(model(x), y))

    other = SGD(MLP().parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="holds a parameter of shape") as caught:
        capture(step, MLP(), other, vector_batch(0))
    assert caught.value.fix.startswith("SGD(model.parameters(), ...) on the model given here")
