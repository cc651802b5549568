"""Calls of ops on fakes, of every kind of result, and the forms of results to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.quick_fakes import QuickFakeMode
from tutti.torch_private.storages import memory_id

aten = torch.ops.aten
MODE = QuickFakeMode()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def transposed() -> Tensor:
    with MODE:
        return torch.empty(6, 4).t()


def column() -> Tensor:
    with MODE:
        return torch.empty(4, 6)[:, 2]


def forms(result: Any, operands: list[Tensor]) -> list[Any]:
    """Of each tensor its form, and the number of the memory in which it lies, those of operands first."""
    memory: dict[int, int] = {}
    for x in operands:
        memory.setdefault(memory_id(x), len(memory))
    return [
        (
            *(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device),
            x.untyped_storage().nbytes(),
            memory.setdefault(memory_id(x), len(memory)),
        )
        if isinstance(x, Tensor)
        else (type(x), x)
        for x in tree_leaves(result)
    ]


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "new": (aten.add.Tensor, lambda: (fake(4, 6), fake(6))),
    "of another layout": (aten.exp.default, lambda: (transposed(),)),
    "view": (aten.view.default, lambda: (fake(4, 6), [2, 12])),
    "view of a part": (aten.slice.Tensor, lambda: (column(), 0, 1, 3)),
    "view of another dtype": (aten.view.dtype, lambda: (fake(4, 6), torch.int32)),
    "a reshape that copies": (aten.reshape.default, lambda: (transposed(), [24])),
    "a reshape that does not": (aten.reshape.default, lambda: (fake(4, 6), [24])),
    "in place": (aten.add_.Tensor, lambda: (fake(4, 6), fake(6))),
    "several, new": (aten.native_layer_norm.default, lambda: (fake(4, 6), [6], None, None, 1e-5)),
    "several, views": (aten.split.Tensor, lambda: (fake(4, 6), 2)),
    "unused results": (
        aten.convolution_backward.default,
        lambda: (
            *(fake(2, 3, 5, 5), fake(2, 4, 5, 5), fake(3, 4, 3, 3), [3]),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]),
        ),
    ),
    "a list": (aten.cat.default, lambda: ([fake(2, 3), fake(4, 3)],)),
    "part of a larger memory": (aten.as_strided.default, lambda: (fake(4, 6), [2], [6], 3)),
    "numbers": (aten.sum.dim_IntList, lambda: (fake(4, 6), [-1], True)),
    "complex": (aten.mul.Tensor, lambda: (fake(4, dtype=torch.complex64), 2.0)),
}
