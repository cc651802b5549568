"""`torch.amp.GradScaler`: its two kernels as ops on tensors, and its choice to skip an update as a branch.

A trace first takes the branch of finite gradients (`read_values`); a call with other gradients has another
program, without the update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tutti.capture.patch_table import SCALED_UPDATE, SCALER_SKIPS, SCALER_STEP
from tutti.capture.value_readers import READER, ValueReader
from tutti.graph.edits.patch import replaced
from tutti.torch_private.optimizer_marks import is_scaled_by_kernel

aten = torch.ops.aten
_SCALER = ValueReader(
    "torch.amp.GradScaler, which skips an update by the gradients,",
    "GradScaler(enabled=False) with torch.autocast in bfloat16 or precision=bf16, which need no scale; or ",
)
_STEP: Any = GradScaler.step


def _unscale(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply the gradients by `inverse`; `found` is 1 where one of them is not finite.

    The largest of a gradient is one kernel, and keeps NaN; few more compare those of all.
    """
    largest: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            largest.setdefault(grad.dtype, []).append(torch.linalg.vector_norm(grad, math.inf))
    for norms in largest.values():
        bad = torch.stack(norms).isfinite().all().logical_not()
        found.copy_(torch.maximum(found, bad.to(found.dtype)))
    for grad in grads:
        grad.mul_(inverse)


def _update(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """Shrink the scale where gradients were not finite; let it grow after `interval` steps where all were."""
    bad = found > 0
    count = tracker + 1
    full = count == interval
    grown = scale * growth
    grown = torch.where(full & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(bad, scale * backoff, grown))
    tracker.copy_(torch.where(bad | full, torch.zeros_like(count), count))
    return scale


# In the form of `make_fx`'s decompositions.
FORMS: dict[Any, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._amp_update_scale_.default: _update,
}


def _maybe_step(
    _scaler: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **options: Any
) -> Any:
    """PyTorch's function with a condition in place of a sum of numbers: a trace guesses it false."""
    token = READER.set(_SCALER)
    try:
        skips = any(bool(found != 0) for found in state["found_inf_per_device"].values())
    finally:
        READER.reset(token)
    if skips:
        return None
    return optimizer.step(*args, **options)


def _step(scaler: GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
    """The scaler's step without kernels that skip an update themselves: the branch does that."""
    if not is_scaled_by_kernel(optimizer):
        return _STEP(scaler, optimizer, *args, **options)
    with replaced((SCALED_UPDATE.of(optimizer), False)):
        return _STEP(scaler, optimizer, *args, **options)


@contextlib.contextmanager
def branching_scaler() -> Iterator[None]:
    """Inside, a scaler skips an update by a branch."""
    with replaced((SCALER_SKIPS, _maybe_step), (SCALER_STEP, _step)):
        yield
