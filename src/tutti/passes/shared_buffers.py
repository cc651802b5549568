"""`shared_buffers`: writes values that ranks of one host reduce directly into shared memory.

    %7 = mm(%5, %6)                                 %b = buffer(data, 0, [64, 32], f32)
    %8 = together(reduce_scatter, [%7], data)  ->   %7 = mm(%5, %6, out=%b)
                                                    %8 = together_(reduce_scatter, [%7], data)

The other ranks then read them in place. Buffers whose values are not alive at the same time share memory. The
pass copies a value into its buffer if the op cannot write it there (no `out=`, other users).

`buffer` waits until no rank still reads its last value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import roots_of
from tutti.graph.analysis.liveness import memory_ends
from tutti.graph.analysis.order import positions_of
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import graphs_of
from tutti.passes.joined import as_together, is_kind, take_out
from tutti.passes.target import Target

aten = torch.ops.aten
Axes = tuple[str, ...]
# Smaller values travel through mailboxes, packed.
LEAST_NBYTES = 2**16
ALIGNMENT = 64
# Ops that write their result straight into `out=`.
_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
}


def shared_buffers(
    graph: fx.Graph, target: Target, kinds: Sequence[str] = ("all_reduce", "reduce_scatter")
) -> int:
    """Rewrite reductions over axes whose ranks share memory; returns the number of values with a buffer."""
    count = 0
    for node in list(graph.nodes):
        if is_kind(node, *kinds) and collectives.axes_of(node) in target.shared:
            count += _move(graph, as_together(graph, node))
    return count


def _move(graph: fx.Graph, node: fx.Node) -> int:
    """Put the large members of `node` into buffers."""
    given: Any = node.args
    kind, xs, axes, wheres, op = given
    large = [i for i, x in enumerate(xs) if _fits(x)]
    if large:
        lying = [_in_buffer(graph, xs[i], node, axes) for i in large]
        args = (kind, lying, axes, [wheres[i] for i in large], op)
        take_out(graph, node, large, collectives.together_, args)
    return len(large)


def _fits(x: fx.Node) -> bool:
    val: Tensor = x.meta["val"]
    return val.nbytes >= LEAST_NBYTES and val.device.type == "cpu" and val.is_contiguous()


def _in_buffer(graph: fx.Graph, x: fx.Node, user: fx.Node, axes: Any) -> fx.Node:
    """`x` as a value in a buffer: made there, or copied right after its node."""
    val: Tensor = x.meta["val"]
    sole = x.op == "call_function" and len(x.users) == 1
    if sole:
        _add_within(x)
    with graph.inserting_before(x if sole else user):
        memory = graph.call_function(collectives.buffer, (axes, 0, list(val.shape), val.dtype))
    memory.meta = {"val": val}
    if sole and x.target in _OUT:
        x.target, x.kwargs = _OUT[x.target], {**x.kwargs, "out": memory}
        return x
    if sole and x.target is aten.embedding_dense_backward.default and not x.args[4]:
        return _embedding(graph, x, memory)
    with graph.inserting_after(x) if sole else graph.inserting_before(user):
        copied = graph.call_function(aten.copy_.default, (memory, x))
    copied.meta = {k: x.meta[k] for k in (*NOTES, "val", "sharding") if k in x.meta}
    return copied


def _add_within(x: fx.Node) -> None:
    """Let a matmul add a row that is added to each of its rows: one pass over memory less."""
    matmul, row = (*x.args, None)[:2] if x.target is aten.add.Tensor else (None, None)
    if not isinstance(matmul, fx.Node) or not isinstance(row, fx.Node) or x.kwargs:
        return
    fits = row.meta["val"].shape == x.meta["val"].shape[1:] and row.meta["val"].dim() == 1
    same = row.meta["val"].dtype == x.meta["val"].dtype == matmul.meta["val"].dtype
    if matmul.target is aten.mm.default and len(matmul.users) == 1 and fits and same:
        x.target, x.args = aten.addmm.default, (row, *matmul.args)
        x.graph.erase_node(matmul)


def _embedding(graph: fx.Graph, x: fx.Node, memory: fx.Node) -> fx.Node:
    """The gradient of an embedding's table: sums its rows in a table of zeros in the buffer."""
    rows, index, _, padding, _ = x.args
    val: Tensor = x.meta["val"]
    notes = {k: x.meta[k] for k in (*NOTES, "sharding") if k in x.meta}

    def add(target: Any, *args: Any, val: Tensor = val) -> fx.Node:
        with graph.inserting_before(x):
            node = graph.call_function(target, args)
        node.meta = notes | {"val": val}
        return node

    def flat(y: Any, shape: list[int]) -> fx.Node:
        return add(aten.reshape.default, y, shape, val=y.meta["val"].reshape(shape))

    empty = add(aten.zero_.default, memory)
    at, what = flat(index, [-1]), flat(rows, [-1, val.shape[1]])
    done = add(aten.index_add_.default, empty, 0, at, what)
    if isinstance(padding, int) and padding >= 0:  # its row gets no gradient
        row = add(aten.select.int, done, 0, padding, val=val[padding])
        add(aten.zero_.default, row, val=val[padding])
    x.replace_all_uses_with(done)
    graph.erase_node(x)
    return done


def leave_buffers(graph: fx.Graph) -> None:
    """Clone results of the program that are in a buffer: the next call reuses the memory."""
    roots = roots_of(graph)
    output = graph.output_node()

    def own(x: fx.Node) -> fx.Node:
        if x not in roots or roots[x].target is not collectives.buffer:
            return x
        with graph.inserting_before(output):
            clone = graph.call_function(aten.clone.default, (x,))
        clone.meta = dict(x.meta)
        return clone

    output.args = fx.map_arg(output.args, own)  # type: ignore[assignment]


def place_buffers(graph: fx.Graph) -> dict[Axes, int]:
    """Give every buffer its offset among those over the same axes; returns their total bytes.

    First fit, in order of use: a buffer may reuse the memory of a dead one. Buffers of a loop's parts are
    separate from those of `graph`, and from each other if a part returns one.
    """
    _, *parts = graphs_of(graph)
    apart = any(map(_gives_buffer, parts))
    ends: dict[Axes, int] = {}
    for one in (*parts, graph):
        for axes, end in _place(one, ends if apart or one is graph else {}).items():
            ends[axes] = max(end, ends.get(axes, 0))
    return ends


def _gives_buffer(graph: fx.Graph) -> bool:
    roots = roots_of(graph)
    given = graph.output_node().all_input_nodes
    return any(x in roots and roots[x].target is collectives.buffer for x in given)


def _place(graph: fx.Graph, bases: Mapping[Axes, int]) -> dict[Axes, int]:
    """The same for one graph, from `bases` on; returns the end of its last buffer."""
    if not any(node.target is collectives.buffer for node in graph.nodes):
        return {}
    order, until = positions_of(graph), memory_ends(graph)
    taken: dict[Axes, list[tuple[int, int, int]]] = {}
    needed: dict[Axes, int] = {}
    for node in graph.nodes:
        if node.target is not collectives.buffer:
            continue
        axes: Any = node.args[0]
        nbytes = -(-node.meta["val"].nbytes // ALIGNMENT) * ALIGNMENT
        busy = sorted(t for t in taken.get(axes, []) if t[2] >= order[node])
        offset = _first_fit(busy, nbytes)
        taken[axes] = [*busy, (offset, offset + nbytes, until[node])]
        base = bases.get(axes, 0)
        needed[axes] = max(needed.get(axes, 0), base + offset + nbytes)
        node.args = (axes, base + offset, *node.args[2:])
    return needed


def _first_fit(busy: list[tuple[int, int, int]], nbytes: int) -> int:
    at = 0
    for begin, end, _ in busy:
        if begin - at >= nbytes:
            break
        at = max(at, end)
    return at
