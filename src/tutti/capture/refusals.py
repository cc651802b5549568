"""What a step may not do if it is to be captured, each with the user's line and a way out."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.optim import Optimizer

from tutti.capture.lift import Hyper, optimizers_of
from tutti.capture.source import quoted, user_line
from tutti.errors import CaptureError, TuttiError


def python_numbers(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in slots.items() if isinstance(v, int | float)}
        for one in optimizers_of(optimizer)
        for slots in one.state.values()
    ]


def refuse_counters(optimizer: Any, before: list[dict[str, Any]]) -> None:
    for old, new in zip(before, python_numbers(optimizer), strict=False):
        for key, value in new.items():
            if old.get(key) != value:
                raise CaptureError(
                    f'the optimizer keeps "{key}" as a Python number that changes with every step',
                    why="the captured step would replay today's number for ever",
                    fix=f'keep it as a tensor: state["{key}"] = torch.tensor(0.0)',
                )


def refuse_changed_numbers(hypers: Sequence[Hyper], given: Mapping[str, Any]) -> None:
    """Raise unless every hyper-parameter still is the symbol that it was given."""
    for hyper in hypers:
        if hyper.raw is not given[hyper.name]:
            raise CaptureError(
                f"the step changes the hyper-parameter {hyper.name}",
                why="the step is captured once; a change made by Python inside it would happen only then",
                fix="call scheduler.step() after the step, outside the function given to distribute",
            )


def _refuse_grouped_product(*_args: Any, **_options: Any) -> Any:
    raise CaptureError(
        "the step multiplies groups of rows whose sizes depend on values",
        at=quoted(user_line()),
        why="which rows belong together is known only when the step runs, so they cannot be split over ranks",
        fix="a product for each row with weights picked by index; of a model of Hugging Face: "
        'model.set_experts_implementation("batched_mm")',
    )


# Ops that are refused where the step calls them, in the form of `make_fx`'s decompositions.
REFUSED_OPS = {torch.ops.aten._grouped_mm.default: _refuse_grouped_product}


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's fused LSTM has a backward that cannot be replayed; its plain form can."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _is_said_to_be_causal(
    _mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None
) -> bool:
    """What the caller says; any other mask is applied as it is."""
    return is_causal is True


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what a trace cannot do into a `CaptureError` that names the user's line."""
    try:
        # Distributions look at the values of their arguments, of which there are none while tracing;
        # transformers at whether a mask is causal, to leave it out in favour of a kernel that knows.
        with (
            _without_onednn(),
            mock.patch.object(Distribution, "_validate_args", False),
            mock.patch.object(transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
        ):
            yield
    except TuttiError:
        raise
    except DynamicOutputShapeException as error:
        raise CaptureError(
            f"{error.func} has a shape that depends on values",
            at=_raising_line(error),
            why="every shape must be known before the step runs",
            fix=_WAYS_OUT.get(error.func, "a mask and torch.where instead of selecting elements"),
        ) from error
    except DataDependentOutputException as error:
        raise CaptureError(
            f"the step decides in Python on values: {error.func}",
            at=_raising_line(error),
            why="the step is captured once, before it has values",
            fix="torch.where(condition, a, b) on tensors, or the computation written out",
        ) from error
    except GuardOnDataDependentSymNode as error:
        raise CaptureError(
            "the step decides in Python on a number that is known only when it runs",
            at=_raising_line(error),
            why="the step is captured once, before it has values",
            fix=_fix_of(error),
        ) from error


# For ops whose shapes depend on values; there is a general one for all others.
_WAYS_OUT = {
    torch.ops.aten._pack_padded_sequence.default: "the padded sequences as they are, and the outputs at "
    "their ends: out[torch.arange(n), lengths - 1]",
}


def _fix_of(error: BaseException) -> str:
    """A way out of a branch; of one in PyTorch's own optimizers, another of those."""
    home = os.path.dirname(inspect.getfile(Optimizer))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inside = [f for f in files if os.path.dirname(f) == home]
    if not inside:
        return "torch.where(condition, a, b) on tensors"
    name = os.path.basename(inside[-1]).removesuffix(".py")
    return (
        f"another optimizer: {name} branches on its count of steps, AdamW, NAdam or Adamax do not"
    )


def _raising_line(error: BaseException) -> str:
    torch_dir = os.path.dirname(torch.__file__)
    here = os.path.dirname(os.path.dirname(__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((torch_dir, here)) and "<" not in frame.filename:
            return quoted(f"{frame.filename}:{frame.lineno}")
    return ""
