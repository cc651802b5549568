"""Fused optimizer kernels that are wrong for some entries of a tensor, found by a trial.

A fused update treats every entry of a tensor alike. PyTorch's kernels have one loop over vectors and another
one for the remaining entries. In some releases one of the two is wrong for some types: `_fused_sgd_` of
PyTorch 2.13 leaves bfloat16 and float16 parameters on a CPU as they were, in all but the last few entries.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tutti.graph.ops.fused_updates import Kernel
from tutti.torch_private.dispatch_modes import no_modes

# Two of the longest vectors (512 bits of 16-bit numbers), and some remaining entries.
_NUM_ENTRIES = 2 * 32 + 3
_OPTIONAL = ("momentum_buffers", "max_exp_avg_sqs")


@cache
def is_faulty(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `kernel` gives different results for equal entries of tensors of `dtype` on `device`.

    Runs the kernel once with and once without the lists that may be empty. It takes well under a
    millisecond, once in a process.
    """
    with no_modes(), torch.no_grad():
        return not all(
            _is_even(x) and _has_moved(x)
            for optional in (True, False)
            for x in _tried(kernel, device, dtype, optional=optional)
        )


def _tried(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, *, optional: bool
) -> list[Tensor]:
    """The tensors that `kernel` writes, from tensors of ones; without step counts."""
    lists: list[list[Tensor]] = []
    for name in kernel.lists:
        given = optional or name not in _OPTIONAL
        shape = () if name == "steps" else (_NUM_ENTRIES,)
        kind = torch.float32 if name == "steps" else dtype
        lists.append([torch.ones(shape, dtype=kind, device=device)] if given else [])
    numbers = dict.fromkeys(kernel.numbers, 0.5)
    if "momentum" in numbers and not optional:
        numbers["momentum"] = 0.0
    switches = {name: name == "amsgrad" and optional for name in kernel.switches}
    kernel.overwrite(*lists, **numbers, **switches)
    return [x for k in kernel.written if kernel.lists[k] == "params" for x in lists[k]]


def _is_even(x: Tensor) -> bool:
    """Whether all entries are the same, up to the last bits: one loop may round less often."""
    wide = x.double()
    return bool((wide - wide[-1]).abs().max() <= 8 * torch.finfo(x.dtype).eps)


def _has_moved(x: Tensor) -> bool:
    return bool((x != 1).all())
