"""`bucket`: joins collectives of one kind over the same axes.

    %5 = reduce_scatter(%3, data, 0, 1, sum)        %8 = together(reduce_scatter, [%3, %6], data, ...)
    %7 = reduce_scatter(%6, data, 0, 1, sum)   ->   %5 = item(%8, 0)
                                                    %7 = item(%8, 1)

Each collective costs a meeting of the ranks, whatever its size, so fewer are cheaper. A reduction moves up to
the position where its operand is ready, a gather down to the first use of its result; neighbors then join.
Between hosts or GPUs, casts of weights to 16 bits move up to their gather. A bucket has a limit of bytes and
of span in the graph: a larger one would keep values alive while they wait for each other. The limit is higher
among many GPUs, where each collective has the latency of many steps.

    reductions   placed behind the last operand of the bucket    ready: |--a--b-c-|R
    gathers      placed before the first use of the bucket       R|-a--b-c--|   :used

Between forward and backward ranks would meet once more, for the loss. So a small reduction of values of the
batch alone (the count of valid targets) runs first of all, where ranks have just met. A small reduction that
serves only results of the step joins others at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor, fx

from tutti.graph.analysis.aliases import is_function
from tutti.graph.analysis.cost import kind_of
from tutti.graph.analysis.order import (
    ancestors_where,
    casts_of_state,
    descendants_where,
    item,
    late_casts,
    positions_of,
    ready_at,
    used_at,
)
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.layout import Mesh
from tutti.passes.target import Target

# The most bytes of a bucket, unless one tensor alone is larger: as a rule, and among more GPUs than few.
BUCKET_NBYTES, LARGE_BUCKET_NBYTES = 25e6, 300e6
FEW_RANKS = 8
# The fraction of the graph that it may span; a tensor below SMALL waits without limit.
SPAN = 0.25
SMALL_NBYTES = 2**16
# The most bytes held for a reduction that runs first or last of all.
LIGHT_NBYTES = 2**20
KINDS = {
    collectives.all_reduce: "all_reduce",
    collectives.reduce_scatter: "reduce_scatter",
    collectives.all_gather: "all_gather",
}


@dataclass
class _Bucket:
    """Collectives to join: `ready` is the position of their last operand, `used` that of the first use of a
    result."""

    nodes: list[fx.Node]
    nbytes: float
    first: int
    ready: int
    used: int


def bucket_nbytes(num_ranks: int, *, on_gpus: bool) -> float:
    """The most bytes of a bucket among so many ranks; processors copy small ones within their caches."""
    return LARGE_BUCKET_NBYTES if on_gpus and num_ranks > FEW_RANKS else BUCKET_NBYTES


def bucket(graph: fx.Graph, target: Target, mesh: Mesh) -> int:
    """Join collectives of `graph`; returns the number of nodes merged into another."""
    joined = 0
    first = _first_of_all(graph)
    _last_of_all(graph)
    for (kind, axes, _, _), nodes in _alike(graph, first).items():
        order = positions_of(graph)
        gathers = kind is collectives.all_gather
        free = gathers and axes in target.shared
        on_gpus = kind_of([node.meta["val"] for node in nodes]) == "cuda"
        limits = bucket_nbytes(mesh.size(axes), on_gpus=on_gpus), SPAN * len(order)
        if free:
            limits = float("inf"), float("inf")
        for one in _buckets(nodes, order, gathers, *limits):
            _join(graph, one, gathers)
            joined += len(one.nodes) - 1
    return joined


def bucket_shares(
    sizes: Iterable[int],
    most_nbytes: float,
    positions: Iterable[float] | None = None,
    most_span: float = float("inf"),
) -> list[float]:
    """The part of a bucket that each of these tensors takes, in this order.

    A bucket has no room for the first tensor behind it. The last one may have, so it counts as far as it is
    full. Small tensors join others.

    Args:
        sizes: bytes.
        most_nbytes: of a bucket.
        positions: of the tensors in the graph.
        most_span: between the first and the last position of a bucket.
    """
    shares, own, full, first = list[float](), list[int](), 0, 0.0
    for nbytes, at in zip(sizes, positions or repeat(0.0), strict=False):
        ends = full + nbytes > most_nbytes or at - first > most_span
        if min(nbytes, full) > SMALL_NBYTES and ends:
            shares += [x / full for x in own]
            own, full = [], 0
        first = first if own else at
        own.append(nbytes)
        full += nbytes
    return shares + [x / max(full, most_nbytes) for x in own]


def _first_of_all(graph: fx.Graph) -> frozenset[fx.Node]:
    """Move the ancestors of small reductions of the batch alone to the front; returns these reductions."""
    found: set[fx.Node] = set()
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in collectives.REDUCTIONS and _nbytes(node, False) <= SMALL_NBYTES:
            behind = ancestors_where(node.all_input_nodes, _is_of_batch)
            if behind is not None:
                found.add(node)
                made |= behind
    given = [n for n in graph.nodes if n.op == "placeholder"]
    for node in [n for n in graph.nodes if n in made and n.op == "call_function"]:
        given[-1].append(node)
        given.append(node)
    return frozenset(found)


def _last_of_all(graph: fx.Graph) -> None:
    """Move the descendants of small reductions to the end, if all of them may wait."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in collectives.REDUCTIONS and _nbytes(node, False) <= SMALL_NBYTES:
            made = descendants_where(node.users, _may_wait)
            late |= {x for x in made or () if x.op != "output"}
    for node in [n for n in graph.nodes if n in late]:
        graph.output_node().prepend(node)


def _is_of_batch(x: fx.Node) -> bool:
    """Whether `x` is a part of the batch, or a small value on the way from it."""
    if x.op == "placeholder":
        return x.meta.get("kind") == "batch"
    return _is_light(x) and (x.target is collectives.shard or is_function(x))


def _may_wait(x: fx.Node) -> bool:
    return x.op == "output" or (is_function(x) and _is_light(x))


def _is_light(x: fx.Node) -> bool:
    val = x.meta.get("val")
    return isinstance(val, Tensor) and val.nbytes <= LIGHT_NBYTES


def _alike(graph: fx.Graph, first: Container[fx.Node]) -> dict[tuple[Any, ...], list[fx.Node]]:
    """Collectives by kind, axes, operation, and membership in `first`."""
    found: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in KINDS:
            op = node.args[-1] if node.target in collectives.REDUCTIONS else ""
            found.setdefault((node.target, node.args[1], op, node in first), []).append(node)
    return found


def _buckets(
    nodes: Iterable[fx.Node],
    order: dict[fx.Node, int],
    gathers: bool,
    most_nbytes: float,
    most_span: float,
) -> list[_Bucket]:
    """The nodes in buckets, each with a valid common position."""
    casts_move = gathers and most_nbytes < float("inf")
    near: Callable[[fx.Node], int] = (
        (lambda n: used_at(n, order)) if gathers else (lambda n: ready_at(n, order))
    )
    found: list[_Bucket] = []
    for node in sorted(nodes, key=lambda n: (near(n), order[n])):
        nbytes = _nbytes(node, gathers)
        # Casts of a weight move with its gather.
        casts = casts_of_state(node.all_input_nodes[0]) if casts_move else []
        ready, used = ready_at(casts[0] if casts else node, order), used_at(node, order)
        if ready >= used:
            continue  # the next node needs it
        last = found[-1] if found else None
        if last is not None:
            fits = last.nbytes + nbytes <= most_nbytes or nbytes <= SMALL_NBYTES
            close = near(node) - last.first <= most_span or nbytes <= SMALL_NBYTES
            if fits and close and max(last.ready, ready) < min(last.used, used):
                last.nodes.append(node)
                last.nbytes += nbytes
                last.ready, last.used = max(last.ready, ready), min(last.used, used)
                continue
        found.append(_Bucket([node], nbytes, near(node), ready, used))
    return found


def _nbytes(node: fx.Node, gathers: bool) -> float:
    """The bytes that wait in a bucket: a gather's result, a reduction's operand."""
    x: Tensor = node.meta["val"] if gathers else node.args[0].meta["val"]  # type: ignore[union-attr]
    return float(x.nbytes)


def _join(graph: fx.Graph, one: _Bucket, gathers: bool) -> None:
    order = positions_of(graph)
    nodes = sorted(one.nodes, key=order.__getitem__)
    lead = nodes[0]
    if gathers:
        anchor = min((user for node in nodes for user in node.users), key=order.__getitem__)
        for x in late_casts([x for node in nodes for x in node.all_input_nodes], anchor, order):
            anchor.prepend(x)
    else:
        given = [n for n in graph.nodes if n.op == "placeholder"]
        operands = [x for node in nodes for x in node.all_input_nodes]
        anchor = max((*given, *operands), key=order.__getitem__)
    if len(nodes) == 1:
        anchor.prepend(lead) if gathers else anchor.append(lead)
        return
    kind, axes = KINDS[lead.target], lead.args[1]  # type: ignore[index]
    op = lead.args[-1] if lead.target in collectives.REDUCTIONS else ""
    wheres = [() if kind == "all_reduce" else tuple(n.args[2:4]) for n in nodes]
    with graph.inserting_before(anchor) if gathers else graph.inserting_after(anchor):
        made = graph.call_function(
            collectives.together, (kind, [n.args[0] for n in nodes], axes, wheres, op)
        )
    largest = max(nodes, key=lambda node: _nbytes(node, gathers))
    made.meta = {k: largest.meta[k] for k in NOTES if k in largest.meta}
    made.meta["val"] = [n.meta["val"] for n in nodes]
    after = made
    for i, node in enumerate(nodes):
        after = item(graph, after, made, i, node)
        node.replace_all_uses_with(after)
        graph.erase_node(node)
