"""`float(x)` and `int(x)` of tensors: numbers that a step returns, keeps, computes with and branches on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import small_model
from ranks import Ranks
from tutti.capture.python import reach
from tutti.errors import CaptureError


def training(loss_of: Callable[[Any, Tensor], Tensor], result: Callable[..., Any]) -> Program:
    """`result` of the model, the batch, the loss and the norm of the gradients is returned."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return result(model, x, loss, norm)

    return step, model, optimizer, (torch.randn(8, 6),)


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def metrics() -> Program:
    def result(model: Any, x: Tensor, loss: Tensor, norm: Tensor) -> dict[str, Any]:
        count = int((x > 0).sum())
        return {
            "loss": float(loss),
            "norm": float(norm),
            "count": count,
            "rate": float((x > 0).sum()) / x.numel(),
            "any": float((x > 9).any()) + int((x < 9).all()),
            "half": float(loss.detach().to(torch.bfloat16)),
            "limit": float("inf"),
            "each": list(map(float, [loss, norm])),
            "sum": float(loss) * int("2") + int(2.7) + float(3),
        }

    return training(mean_square, result)


class Meter:
    """Keeps moving averages in Python."""

    def __init__(self) -> None:
        self.mean, self.seen = 0.0, 0

    def add(self, loss: Tensor, mask: Tensor) -> float:
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        self.seen += int(mask.sum())
        return self.mean


def averages() -> Program:
    meter = Meter()

    def result(model: Any, x: Tensor, loss: Tensor, norm: Tensor) -> Any:
        return meter.add(loss, x > 0), meter.seen

    return training(mean_square, result)


def computing() -> Program:
    """The loss depends on numbers of Python, and the way on one of them."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        z = model(x)
        scale = float(x.abs().max())
        loss = z.square().sum() / max(1, int((x > 0).sum())) / scale
        return loss * 3 if float(loss.detach()) > 1e-3 and isinstance(scale, (int, float)) else loss

    return training(loss_of, lambda model, x, loss, norm: loss.detach())


def scheduled() -> Program:
    """PyTorch's schedulers, whose `float` is another during a trace, use it as a class, too."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ramp = lr_scheduler.ConstantLR(optimizer, 0.1, 1)
    rates = lr_scheduler.SequentialLR(
        optimizer, [ramp, lr_scheduler.ExponentialLR(optimizer, 0.9)], [1]
    )
    limit = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = mean_square(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        limit.step(loss.detach())
        return loss, optimizer.param_groups[0]["lr"]

    return step, model, optimizer, (torch.randn(8, 6),)


PROGRAMS = [metrics, averages]


@pytest.mark.parametrize("program", [*PROGRAMS, computing, scheduled])
def test_the_numbers_are_eagers(program: Callable[[], Program]) -> None:
    assert_as_eager(program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_numbers_are_eagers_on_ranks(program: Callable[[], Program], ranks: Ranks) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=2")


def refused(read: Callable[[Tensor], Any]) -> CaptureError:
    def step(model: Any, x: Tensor) -> Any:
        return model(x).sum() * read(x)

    with pytest.raises(CaptureError) as caught:
        tutti.distribute(step, small_model(), None, "")(torch.randn(8, 6))
    return caught.value


def cut_off(x: Tensor) -> int:
    return int(x.abs().max())  # a fraction


def as_text(x: Tensor) -> int:
    return len(f"{float(x.max())}")  # a text


def as_size(x: Tensor) -> Any:
    return x[: int((x[:, 0] > 0).sum())].sum()  # a size


def as_range(x: Tensor) -> int:
    return sum(range(int((x > 0).sum())))  # a range


@pytest.mark.parametrize(
    ("read", "comment", "what"),
    [
        (cut_off, "a fraction", "plain number"),
        (as_text, "a text", "text"),
        (as_size, "a size", "size"),
        (as_range, "a range", "plain number"),
    ],
)
def test_what_stays_refused(read: Callable[[Tensor], Any], comment: str, what: str) -> None:
    error = refused(read)
    assert what in error.what
    assert f"# {comment}" in error.at


def test_the_built_in_names_come_back() -> None:
    refused(cut_off)
    assert "float" not in globals() and "int" not in globals()
    assert_as_eager(metrics)
    assert "float" not in globals() and "int" not in globals()


def _calls(x: Any) -> Any:
    return float(x), [int(y) for y in x]


def _tests(x: Any) -> Any:
    return float(x) if isinstance(x, float) or not isinstance(x, (int, float)) else x


def _compares(x: Any) -> Any:
    return float(x) if type(x) is float else x


def _hands_on(x: Any) -> Any:
    return float(x), torch.ones(2, dtype=float), (lambda: [int])()


def test_uses_of_a_name() -> None:
    assert reach._uses(_calls.__code__, "float") == {"call"}
    assert reach._uses(_calls.__code__, "int") == {"call"}
    assert reach._uses(_tests.__code__, "float") == {"call", "argument"}
    assert reach._uses(_tests.__code__, "int") == {"argument"}
    assert reach._uses(_compares.__code__, "float") == {"call", "another"}
    assert reach._uses(_hands_on.__code__, "float") == {"call", "another"}
    assert reach._uses(_hands_on.__code__, "int") == {"another"}
    assert reach._uses((lambda: float.fromhex("0x1")).__code__, "float") == {"attribute"}


SOURCE = """
import torch

def step(model, x):
    loss = model(x).square().mean()
    {line}
    return loss * float(loss.detach())
"""


def step_of(line: str) -> Any:
    """A step in globals of its own."""
    scope: dict[str, Any] = {}
    exec(compile(SOURCE.format(line=line), "script.py", "exec"), scope)
    return scope["step"]


def played_and_eager(line: str) -> tuple[float, float]:
    model, x = small_model(), torch.randn(8, 6)
    step = step_of(line)
    return float(tutti.distribute(step, model, None, "")(x)), float(step(model, x).detach())


@pytest.mark.parametrize(
    "line",
    [
        "loss = loss * (2 if isinstance(x.shape[0], int) else 3) * int(2.5)",
        "loss = loss * {int: 3.0}.get(int, 5.0) if False else loss",
        "loss = loss * sum(map(abs, [float(k) for k in range(3)]))",
        "loss = loss * float.fromhex('0x1p-1')",
    ],
)
def test_other_uses_are_as_in_eager(line: str) -> None:
    played, eager = played_and_eager(line)
    assert played == pytest.approx(eager)


def test_a_script_that_hands_the_class_on_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="plain number"):
        played_and_eager("loss = loss * torch.ones(1, dtype=float).float().sum()")


KINDS = (
    "isinstance(loss.item(), float)",
    "isinstance(loss.item(), (int, float)) and not isinstance(loss.item(), int)",
    "isinstance(loss.item(), int | float)",
    "isinstance((x > 0).sum().item(), int)",
    "isinstance((x > 0).sum().item(), numbers.Integral)",
    "type(loss.item()) is float and type((x > 0).sum().item()) in (int,)",
    "isinstance(loss, torch.Tensor) and not isinstance(loss, float) and isinstance(loss.item(), object)",
    "not isinstance(loss.item(), torch.Tensor) and not isinstance(loss.item(), str)",
    "isinstance(float(loss), float) and isinstance(int(x.size(0)), int)",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_number_is_a_number(kind: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile(KIND_SOURCE.format(kind=kind), "script.py", "exec"), scope)
    model, x = small_model(), torch.randn(8, 6)
    played = tutti.distribute(scope["step"], model, None, "")(x)
    assert float(played) == pytest.approx(3 * float(model(x).square().mean()), rel=1e-6)


KIND_SOURCE = """
import numbers
import torch

def step(model, x):
    loss = model(x).square().mean().detach()
    return loss * (3 if {kind} else 5)
"""
