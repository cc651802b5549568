"""Refusals of steps that capture does not support, each with the user's line and a fix."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.capture.patch_table import IS_CAUSAL, SELECTIVE, VALIDATE_ARGS
from tutti.capture.python.ways_out import of_error
from tutti.errors import CaptureError, TuttiError
from tutti.graph.edits.patch import replaced
from tutti.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from tutti.torch_private.symbolic import GuardOnDataDependentSymNode


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Turn off oneDNN's fused LSTM, whose backward cannot be replayed; the plain form's can.

    Also after `torch.backends.disable_global_flags()`, which forbids to assign `enabled`.
    """
    onednn: Any = torch.backends.mkldnn
    before, *_ = onednn.set_flags(_enabled=False)
    try:
        yield
    finally:
        onednn.set_flags(_enabled=before)


def _is_said_to_be_causal(
    _mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None
) -> bool:
    """Whether the caller asks for a causal mask; any other mask applies unchanged."""
    return is_causal is True


def _is_eager(*_call: Any) -> bool:
    """Whether a compiler decides what a selective checkpoint recomputes."""
    return False


_NO_SELECTION = (
    "a mask and torch.where instead of selecting elements; a mask that the step makes of constants alone "
    "(torch.eye, torch.arange) may select them"
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of a trace into a `CaptureError` that names the user's line."""
    try:
        with (
            _without_onednn(),
            replaced(
                (VALIDATE_ARGS, False), (IS_CAUSAL, _is_said_to_be_causal), (SELECTIVE, _is_eager)
            ),
        ):
            yield
    except TuttiError:
        raise
    except DynamicOutputShapeException as error:
        known = _WAYS_OUT.get(error.func)
        told = of_error(error, _NO_SELECTION)
        raise CaptureError(
            f"{error.func} has a shape that depends on values",
            at=told.at,
            why="every shape must be known before the step runs" + told.inside,
            fix=known or told.fix,
        ) from error
    except DataDependentOutputException as error:
        told = of_error(
            error, "torch.where(condition, a, b) on tensors, or the computation written out"
        )
        raise CaptureError(
            f"the step decides in Python on values: {error.func}",
            at=told.at,
            why="the step is captured once, before it has values" + told.inside,
            fix=told.fix,
        ) from error
    except GuardOnDataDependentSymNode as error:
        told = of_error(error, "torch.where(condition, a, b) on tensors")
        raise CaptureError(
            "the step decides in Python on a number that is known only when it runs",
            at=told.at,
            why="the step is captured once, before it has values" + told.inside,
            fix=_other_optimizer(error) or told.fix,
        ) from error


# Fixes for ops whose shapes depend on values; a general one serves all others.
_WAYS_OUT = {
    torch.ops.aten.bincount.default: "torch.bincount(x, minlength=n), with n above each value",
    torch.ops.aten._pack_padded_sequence.default: "the padded sequences as they are, and the outputs at "
    "their ends: out[torch.arange(n), lengths - 1]",
}


def _other_optimizer(error: BaseException) -> str:
    """The fix for a branch in one of PyTorch's own optimizers; "" for any other branch."""
    home = os.path.dirname(inspect.getfile(Optimizer))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inside = [f for f in files if os.path.dirname(f) == home]
    if not inside:
        return ""
    name = os.path.basename(inside[-1]).removesuffix(".py")
    return (
        f"another optimizer: {name} branches on its count of steps, AdamW, NAdam or Adamax do not"
    )
