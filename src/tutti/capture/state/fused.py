"""Optimizers that trace through PyTorch's fused kernels, and these kernels as ops of the graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tutti.capture.patch_table import FUSED
from tutti.errors import CaptureError
from tutti.graph.edits.patch import replaced
from tutti.graph.ops.faulty_kernels import is_faulty
from tutti.graph.ops.fused_updates import KERNELS, Kernel
from tutti.graph.players.device import device_of
from tutti.user_lines import quoted, user_line

_BY_NAME = {k.name: k for k in KERNELS}


class NoMomentum(CaptureError):
    """A step of SGD on a parameter without momentum: its first momentum is the gradient.

    A kernel takes a momentum of every parameter, or makes those of all. The trace ends.
    """

    def __init__(self, param: Tensor) -> None:
        super().__init__(
            "SGD takes a step on a parameter whose momentum is gone",
            at=quoted(user_line()),
            why="a step is captured with slots made beforehand, and is the same at every call",
            fix='optimizer.state[p]["momentum_buffer"].zero_() where the step removes state',
        )
        self.param = param


def _kernel(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel | None:
    """The kernel that the optimizer's own `step` would call for a group, or None."""
    own = inspect.unwrap(type(optimizer).step)
    for kind, name in ((Adam, "adam"), (SGD, "sgd"), (Adagrad, "adagrad")):
        if isinstance(optimizer, kind) and own is inspect.unwrap(kind.step):
            return _BY_NAME["adamw" if group.get("decoupled_weight_decay") else name]
    return None


def qualifies(optimizer: Optimizer) -> bool:
    """Whether `fused=True` in each group changes a step of `optimizer` by rounding only."""
    for group in optimizer.param_groups:
        kernel = _kernel(optimizer, group)
        if kernel is None or "fused" not in group or group.get("differentiable"):
            return False
        for p in group["params"]:
            slots = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
            if not _fits(kernel, p, slots):
                return False
    return True


def _fits(kernel: Kernel, p: Tensor, slots: list[Tensor]) -> bool:
    """Whether the kernel accepts a parameter; a run moves the meta device's to its own device."""
    here = all(x.device == p.device or "meta" in (x.device.type, p.device.type) for x in slots)
    device = device_of(p)
    counted = torch.float32 if device.type == "cuda" else None  # a GPU reads the counts in place
    same = all(x.dtype in ((p.dtype,) if x.dim() else (counted or x.dtype,)) for x in slots)
    fits = here and same and p.layout == torch.strided and kernel.has(device, p.dtype)
    return fits and not is_faulty(kernel, device, p.dtype)


@contextlib.contextmanager
def as_ops() -> Iterator[None]:
    """Inside, calls of PyTorch's fused functions become tutti's ops, whose numbers may be symbols."""
    with replaced(*((FUSED[kernel.fused_name], _recording(kernel)) for kernel in KERNELS)):
        yield


def _recording(kernel: Kernel) -> Callable[..., None]:
    constants = dict(kernel.constants)

    def record(*lists: Any, grad_scale: Any = None, found_inf: Any = None, **numbers: Any) -> None:
        if grad_scale is not None or found_inf is not None:
            raise CaptureError(
                "the optimizer's step depends on a gradient scaler",
                why="whether a step is skipped would have to be read from a tensor",
                fix="train in bfloat16, which needs no scaler",
            )
        is_first = {name: numbers.pop(name) for name in constants} != constants
        for slots in lists[1:]:
            for param, slot in zip(lists[0], slots, strict=False):
                if is_first or slot is None:
                    raise NoMomentum(param)
        kernel.recorded(*lists, **numbers)

    return record
