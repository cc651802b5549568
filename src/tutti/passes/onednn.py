"""`onednn`: turns large matmuls into calls of oneDNN, where that library is faster.

    %7 = mm(%5, %w)             ->   %6 = permute(%w, [1, 0])        product(x, weight) = x @ weight.T
                                     %7 = product(%5, %6)

    %6 = permute(%g, [1, 0])    ->   %6 = permute(%g, [1, 0])
    %7 = mm(%6, %x, out=%b)          %7 = permute(%x, [1, 0])
                                     %8 = product(%7, %6)            here %x is smaller than %g
                                     %9 = permute(%8, [1, 0])
                                     %10 = copy_(%b, %9)

oneDNN's op has no `out=`, copies a transposed left operand and takes longer to start. So the pass may
multiply the transposes instead, and it rewrites a matmul only if the predicted gain exceeds these costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tutti.graph.edits.edit import Editor, Emit, value_of
from tutti.graph.ops.matmul import matmul
from tutti.passes.target import Target

aten = torch.ops.aten
_MATMULS = frozenset({aten.mm, aten.addmm, aten.linear})
_DTYPES = (torch.float32, torch.float64)  # float64 uses the same op, for comparisons
# For one thread: each library's flops per second, extra seconds per call, bytes moved per second.
MKL_FLOPS, ONEDNN_FLOPS = 9e10, 1.8e11
START_SECONDS = 1e-5
TURNED_BYTES, COPIED_BYTES = 4e9, 1e10


class Operands(NamedTuple):
    """The operands of a matmul: (m, k), (k, n) and (n,), the first of `linear` with more leading dims.

    turned: the right one has shape (n, k).
    """

    x: fx.Node
    y: fx.Node
    bias: fx.Node | None
    turned: bool


def onednn(graph: fx.Graph, target: Target) -> int:
    """Rewrite `graph`; returns the number of matmuls turned into oneDNN's."""
    count = 0
    turned: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes) if target.onednn else ():
        if _is_transpose(node):
            turned.setdefault(node.args[0], node)  # type: ignore[arg-type]
        given = _operands(node)
        if given is not None:
            count += _rewrite(graph, node, given, turned)
    for node in list(graph.nodes) if count else ():
        if _is_transpose(node) and not node.users:
            graph.erase_node(node)
    return count


def _operands(node: fx.Node) -> Operands | None:
    """The operands of a matmul; None for another op, or a form that oneDNN's op lacks."""
    kind = getattr(node.target, "overloadpacket", None)
    if kind not in _MATMULS or set(node.kwargs) - {"out"}:
        return None
    given: list[Any] = [*node.args, None]
    bias, x, y = given[:3] if kind is aten.addmm else (given[2], *given[:2])
    values = [n.meta["val"] for n in (x, y, bias) if n is not None]
    fits = all(v.dtype in _DTYPES and v.device.type == "cpu" for v in values)
    fits &= bias is None or values[-1].dim() == 1
    return Operands(x, y, bias, kind is aten.linear) if fits else None


def _rewrite(
    graph: fx.Graph, node: fx.Node, given: Operands, transposes: dict[fx.Node, fx.Node]
) -> bool:
    """Rewrite the matmul `node` if that gains time; all ranks decide alike.

    `transposes` are those that exist already.
    """
    x, y, bias, turned = given
    left, right, made = value_of(x), value_of(y), value_of(node)
    flops = 2 * made.numel() * left.shape[-1]
    gain = flops * (1 / MKL_FLOPS - 1 / ONEDNN_FLOPS) - START_SECONDS
    plain = _turning(left) + (made.nbytes / COPIED_BYTES if node.kwargs else 0)
    swapped = _turning(right.mT) + made.nbytes / TURNED_BYTES
    swaps = bias is None and not turned and swapped < plain
    if gain <= (swapped if swaps else plain):
        return False
    emit = Editor(graph).at(node)
    if swaps:
        result = emit(
            aten.permute.default, emit(matmul, _transposed(emit, y, transposes), x), [1, 0]
        )
        if not node.kwargs:
            result = emit(aten.clone.default, result, memory_format=torch.contiguous_format)
    else:
        weight = y if turned else _transposed(emit, y, transposes)
        result = emit(matmul, x, weight, *([bias] if bias else []))
    if node.kwargs:
        result = emit(aten.copy_.default, node.kwargs["out"], result)
    result.meta |= {k: node.meta[k] for k in ("val", "sharding") if k in node.meta}
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


def _turning(left: Tensor) -> float:
    """Seconds to copy a left operand whose rows are not contiguous; else 0."""
    return 0 if left.is_contiguous() else left.nbytes / TURNED_BYTES


def _transposed(emit: Emit, x: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The transpose of a matrix: its base, if it is a transpose, or a view."""
    if _is_transpose(x):
        source: Any = x.args[0]
        return source
    if x not in known:
        known[x] = emit(aten.permute.default, x, [1, 0])
    return known[x]


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
