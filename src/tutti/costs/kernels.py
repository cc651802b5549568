"""The kernels that a device runs for a graph, each with its shapes and its bytes.

    %1 = mul(%s, 0.125)      \
    %2 = add(%1, %mask)       }  one kernel: reads %s and %mask, writes %3
    %3 = _softmax(%2)        /
    %4 = bmm(%3, %v)            one kernel: a matmul of (batch, m, n, k)

A view is no kernel. Pointwise ops join their producer or consumer, as fused kernels and compilers do
(Megatron's fused softmax, bias-gelu and bias-dropout-add; torch.compile), if nothing else reads the value
between them; a normalization takes pointwise ops before it in.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import viewed
from tutti.graph.analysis.cost import flops_of
from tutti.graph.analysis.draws import is_draw
from tutti.graph.ops import collectives
from tutti.graph.ops.fused_updates import BY_OP
from tutti.graph.ops.matmul import matmul
from tutti.graph.ops.overloads import arguments_of
from tutti.torch_private.pytrees import tree_leaves

aten = torch.ops.aten

# Ops that move or compute nothing at run time: names, indices known beforehand.
_FREE = (operator.getitem, collectives.positions, collectives.partialize)
_ADDING = (
    aten.addmm,
    aten.addmm_,
    aten.baddbmm,
    aten.baddbmm_,
)  # take a summand before the operands
_MATMULS = (aten.mm, aten.bmm, *_ADDING, aten.linear, matmul.overloadpacket)
# Kinds of kernels, by a part of the names of their ops.
ATTENTION, CONVOLUTION, BATCH_NORM = "attention", "convolution", "batch norm"
_KINDS = {"attention": ATTENTION, "convolution": CONVOLUTION, "batch_norm": BATCH_NORM}
# Ops of several kernels, each of which reads the operands: gradients of a norm's input, and of its weights.
_NUM_LAUNCHES = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 2,
    "near": 4,  # a search and its end, and two for the check
    "from_start": 6,
}
# Reductions along a dim that read their operand as a stream: pointwise producers join them.
_ROW_OPS = ("_softmax", "_log_softmax", "native_layer_norm", "amax", "sum", "exp", "mean")


@dataclass(frozen=True)
class MatmulShape:
    """`batch` products of (m, k) and (k, n); `itemsize` bytes of an element.

    aligned_nbytes: the largest power of two, at most 16, that divides the bytes of every row in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    aligned_nbytes: int = 16

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel: its nodes, the bytes that it reads and writes, and the shape of its matmul, if any.

    flops: of convolutions and attention, whose `matmul` is None, in `dtype`; causal attention skips the pairs
        of tokens that its mask hides.
    kind: of a fused kernel of attention, a convolution, a batch norm; "" for others.
    num_launches: kernels that one op needs; each reads the operands. Fused updates have none of
        their own: one kernel updates many parameters.
    """

    nodes: tuple[fx.Node, ...]
    read_nbytes: int
    written_nbytes: int
    matmul: MatmulShape | None
    flops: float
    dtype: torch.dtype
    num_launches: int = 1
    kind: str = ""

    @property
    def node(self) -> fx.Node:
        """The node after which it is named: the matmul or the reduction, else the last."""
        return next((n for n in self.nodes if not _is_pointwise(n)), self.nodes[-1])

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read_nbytes + self.written_nbytes


def kernels_of(
    graph: fx.Graph, *, fused: bool | Callable[[fx.Node], bool] = True
) -> list[DeviceKernel]:
    """The kernels of a graph in order; collectives are none.

    Args:
        graph: a captured or partitioned program with fake values.
        fused: join pointwise ops, all or those nodes for which it is true; otherwise each op is a kernel.
    """
    joins = fused if callable(fused) else lambda _: bool(fused)
    return [_kernel(group) for group in _groups(graph, joins)]


def is_collective(node: fx.Node) -> bool:
    """Whether a node moves values between ranks."""
    return node.op == "call_function" and node.target in collectives.PLAYED


def _groups(graph: fx.Graph, joins: Callable[[fx.Node], bool]) -> Iterable[list[fx.Node]]:
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if not _is_work(node):
            continue
        group = groups[node] = [node]
        if not joins(node) or not (_is_pointwise(node) or _takes_producers(node)):
            continue
        for source in map(_through_views, node.all_input_nodes):
            joined = groups.get(source)
            if joined and joined is not group and joins(source) and _may_join(source, node):
                joined.extend(n for n in group if n not in joined)
                for member in group:
                    groups[member] = joined
                group = joined
    return {id(group): group for group in groups.values()}.values()


def _may_join(source: fx.Node, node: fx.Node) -> bool:
    """Whether the pointwise `source` may share a kernel with its reader `node`."""
    return (
        _is_pointwise(source)
        and source.meta.get("region") == node.meta.get("region")
        and (_takes_producers(node) or _numel(source) == _numel(node))
        and _is_read_once(source, node)
    )


def _is_read_once(source: fx.Node, node: fx.Node) -> bool:
    """Whether no later op of the same region reads it; a copy for the backward is a write, not a kernel."""
    readers = {r for r in _readers(source) if r.meta.get("region") == source.meta.get("region")}
    return readers <= {node}


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and (viewed(user) is not None or user.target in _FREE):
            yield from _readers(user)
        else:
            yield user


def _through_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (source := viewed(node)) is not None:
        node = source
    return node


def _is_work(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in _FREE or is_collective(node):
        return False
    val = node.meta.get("val")
    if not isinstance(val, Tensor) and not any(isinstance(x, Tensor) for x in tree_leaves(val)):
        return False
    return viewed(node) is None or _copies(node)


def _copies(node: fx.Node) -> bool:
    """Whether an op that may return a view of its operand cannot: a reshape of a transposed value."""
    source, made = viewed(node), node.meta["val"]
    if node.target is not aten.reshape.default or source is None or made.numel() == 0:
        return False
    x = source.meta["val"]
    strides = torch.empty_strided(x.shape, x.stride(), device="meta")  # much faster than a fake
    try:
        strides.view(made.shape)
    except RuntimeError:
        return True
    return False


def _is_pointwise(node: fx.Node) -> bool:
    if is_draw(node):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in (
        aten._to_copy.default,
        aten.full.default,
        aten.full_like.default,
    )


def _takes_producers(node: fx.Node) -> bool:
    return _op_of(node) in _ROW_OPS


def _op_of(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _numel(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.numel() if isinstance(val, Tensor) else 0


def _kernel(nodes: list[fx.Node]) -> DeviceKernel:
    inside = set(nodes)
    read = {s for n in nodes for s in map(_through_views, n.all_input_nodes) if s not in inside}
    written = [n for n in nodes if any(r not in inside for r in _readers(n))] or nodes[-1:]
    heavy = next((n for n in nodes if not _is_pointwise(n)), nodes[-1])
    shape = matmul_shape(heavy)
    launches = 0 if heavy.target in BY_OP else _NUM_LAUNCHES.get(_op_of(heavy), 1)
    return DeviceKernel(
        nodes=tuple(nodes),
        read_nbytes=max(1, launches) * sum(_nbytes_read(s, heavy) for s in read),
        written_nbytes=sum(map(_nbytes, written)),
        matmul=shape,
        flops=flops_of(heavy) * _computed_share(heavy) if shape is None else shape.flops,
        dtype=_dtype(heavy),
        num_launches=launches,
        kind=_kind(heavy),
    )


def _kind(node: fx.Node) -> str:
    name = _op_of(node)
    return next((kind for word, kind in _KINDS.items() if word in name), "")


def _computed_share(node: fx.Node) -> float:
    """The share of the pairs of tokens that attention computes: blocks above the diagonal are skipped."""
    if _kind(node) != ATTENTION:
        return 1.0
    given = arguments_of(node.target, node.args, node.kwargs)
    return 0.5 if given.get("is_causal") is True else 1.0


def _nbytes(node: fx.Node) -> int:
    leaves = tree_leaves(node.meta.get("val"))
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


def _nbytes_read(source: fx.Node, node: fx.Node) -> int:
    """A look-up reads rows of its table, no more than it returns."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.embedding, aten.index, aten.gather):
        return min(_nbytes(source), _nbytes(node))
    return _nbytes(source)


def _dtype(node: fx.Node) -> torch.dtype:
    read = [x for n in node.all_input_nodes for x in tree_leaves(n.meta.get("val"))]
    tensors = [x for x in (*read, *tree_leaves(node.meta.get("val"))) if isinstance(x, Tensor)]
    floating = [x.dtype for x in tensors if x.dtype.is_floating_point]
    return floating[0] if floating else torch.float32


def matmul_shape(node: fx.Node) -> MatmulShape | None:
    """The shape of a node that is a matmul; None for others."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _MATMULS:
        return None
    operands: list[Any] = list(node.args)
    a, b = operands[1:3] if packet in _ADDING else operands[:2]
    left, right, made = a.meta["val"], b.meta["val"], node.meta["val"]
    transposed = packet in (aten.linear, matmul.overloadpacket)
    k = left.shape[-1]
    n = right.shape[0] if transposed else right.shape[-1]
    batch = math.prod(left.shape[:-2]) if right.ndim > 2 else 1
    m = made.numel() // max(1, batch * n)
    return MatmulShape(batch, m, n, k, left.dtype, _alignment(left, right, made))


def _alignment(*tensors: Tensor) -> int:
    """The bytes, at most 16, that divide the distance of rows in every operand and in the result."""
    steps = [s * x.element_size() for x in tensors for s in x.stride() if s > 1]
    return math.gcd(16, *steps)
