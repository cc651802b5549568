"""`as_strided` depends on memory; a graph has values only, so it becomes views and lookups.

An operand that fills its memory without gaps is permuted to the order of its memory. Dims of the result are
split off this line as long as they traverse all of it; the rest is a lookup along its last dim.

Determinants depend on memory, too: `_linalg_det` and `_linalg_slogdet` factor the transpose of a contiguous
matrix, and the matrix itself in any other order. Their backward reads these factors. In a graph they always
get a contiguous matrix (`graph.ops.memory_order`): the transpose, where the user's was not contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tutti.errors import CaptureError
from tutti.graph.edits.edit import Emit, inverse, permuted, shaped, source_of
from tutti.user_lines import quoted

aten = torch.ops.aten
# On a call: the memory of its operand in the step, before any rewrite.
LAID_OUT = "laid_out"


class _OperandMemory(NamedTuple):
    strides: tuple[int, ...]
    offset: int
    is_contiguous: bool


def note_layout(graph: fx.Graph) -> None:
    """Note the memory of each call's operand."""
    for node in graph.nodes:
        if node.target in STRIDED:
            val: Any = node.args[0].meta["val"]
            offset = int(val.storage_offset())
            node.meta[LAID_OUT] = _OperandMemory(tuple(val.stride()), offset, val.is_contiguous())


@dataclass(frozen=True)
class StridedView:
    """The view of a call: the operand's dims in the order of its memory, and the result's dims.

    `split` are the dims of the result that traverse the whole line, one after the other, each within its
    predecessor's stride; `left` are the others, `step` their strides, `start` their offset in the remaining
    `width` elements.
    """

    order: list[int]
    sizes: list[int]
    split: list[int]
    left: list[int]
    step: list[int]
    start: int
    width: int

    @staticmethod
    def of(
        x: Sequence[int],
        strides: Sequence[int],
        size: Sequence[int],
        step: Sequence[int],
        start: int,
    ) -> StridedView | None:
        """The view of a call; None if the operand has gaps or the result exceeds it."""
        order = sorted(range(len(x)), key=lambda d: (-strides[d] if x[d] != 1 else 0, d))
        dense = 1
        for d in reversed(order):
            if x[d] != 1 and strides[d] != dense:
                return None
            dense *= x[d]
        wide = [d for d in range(len(size)) if size[d] != 1]
        last = start + sum((size[d] - 1) * step[d] for d in wide)
        if start < 0 or last >= dense or any(step[d] < 0 for d in wide):
            return None
        left, split, width = sorted(wide, key=lambda d: -step[d]), list[int](), dense
        while left and size[left[0]] * step[left[0]] == width:
            rest = start + sum((size[d] - 1) * step[d] for d in left[1:])
            if rest >= step[left[0]]:
                break
            width = step[left[0]]
            split.append(left.pop(0))
        sizes = [size[d] for d in split]
        return StridedView(order, sizes, split, left, [step[d] for d in left], start, width)

    @property
    def line(self) -> list[int]:
        """The operand's shape in the order of memory: the dims split off, and the rest."""
        return [*self.sizes, self.width]

    def places(self, emit: Emit, size: Sequence[int], device: torch.device) -> fx.Node:
        """The position in the rest of each element of the remaining dims, 1-D."""
        total = emit(aten.arange.start, self.start, self.start + 1, device=device)
        for d, step in zip(self.left, self.step, strict=True):
            dim = emit(aten.arange.default, size[d], device=device)
            dim = emit(aten.mul.Tensor, dim, step) if step != 1 else dim
            column = shaped(emit, total, [*total.meta["val"].shape, 1])
            total = emit(aten.add.Tensor, column, dim)
        return shaped(emit, total, [math.prod(size[d] for d in self.left)])

    @property
    def is_whole(self) -> bool:
        """Whether the result has each element of the operand once."""
        return self.width == 1 and not self.left


def strided(emit: Emit, node: fx.Node) -> fx.Node:
    """`as_strided` as a view, or a view and a lookup along its last dim."""
    given: Any = node.args
    x, size = given[0], given[1]
    if 0 in size:
        val: Tensor = x.meta["val"]
        return emit(aten.full.default, list(size), 0, dtype=val.dtype, device=val.device)
    layout = _layout(node, size, given[2], given[3] if len(given) > 3 else None)
    line = shaped(emit, permuted(emit, x, layout.order), layout.line)
    if not layout.is_whole:
        at = layout.places(emit, size, x.meta["val"].device)
        line = emit(aten.index_select.default, line, len(layout.split), at)
    dims = [*layout.split, *layout.left]
    return _as_in(emit, line, dims, size)


def strided_scatter(emit: Emit, node: fx.Node) -> fx.Node:
    """`as_strided_scatter`: the operand with other values at these positions."""
    given: Any = node.args
    x, values, size = given[:3]
    if 0 in size:
        return x
    layout = _layout(node, size, given[3], given[4] if len(given) > 4 else None)
    dims = [*layout.split, *layout.left]
    once = [d for d in range(len(size)) if size[d] == 1]
    values = permuted(emit, values, [*dims, *once])
    if layout.is_whole:
        line = shaped(emit, values, layout.line)
    else:
        line = shaped(emit, permuted(emit, x, layout.order), layout.line)
        at = layout.places(emit, size, x.meta["val"].device)
        values = shaped(emit, values, [*layout.sizes, *at.meta["val"].shape])
        indices = [*[None] * len(layout.split), at]
        line = emit(aten.index_put.default, line, indices, values)
    shape = list(x.meta["val"].shape)
    laid = shaped(emit, line, [shape[d] for d in layout.order])
    return permuted(emit, laid, inverse(layout.order))


def _as_in(emit: Emit, line: fx.Node, dims: list[int], size: Sequence[int]) -> fx.Node:
    """The dims of a line in the order of the result, with those of size 1."""
    laid = shaped(emit, line, [size[d] for d in dims])
    laid = permuted(emit, laid, inverse(dims))
    return shaped(emit, laid, size)


def _layout(node: fx.Node, size: Any, step: Any, start: Any) -> StridedView:
    x: Any = node.args[0]
    memory = node.meta[LAID_OUT]
    first = 0 if start is None else int(start) - memory.offset
    found = StridedView.of(x.meta["val"].shape, memory.strides, size, step, first)
    if found is None:
        raise CaptureError(
            "as_strided reads memory that is not its operand's, or an operand with gaps",
            at=quoted(source_of(node)),
            why="a captured step has values, and no memory around them",
            fix="x.contiguous() before it, or a view: unfold, expand, slices",
        )
    return found


def determinant(emit: Emit, node: fx.Node) -> fx.Node | None:
    """The call with a contiguous matrix: the transpose, if the user's has another order.

    Kernels factor complex matrices themselves in every order.
    """
    x: Any = node.args[0]
    val: Tensor = x.meta["val"]
    if node.meta[LAID_OUT].is_contiguous or val.is_complex():
        return None
    order = [*range(val.ndim - 2), val.ndim - 1, val.ndim - 2]
    return emit(node.target, permuted(emit, x, order))


STRIDED = (
    aten.as_strided.default,
    aten.as_strided_scatter.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
)
