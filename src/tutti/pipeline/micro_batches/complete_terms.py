"""Sums over the micro-batches in which some terms are complete: only the others are added up over time.

    sum(partialize(a) + x + y)  ->  a + sum(x) + sum(y)

The partition may add a complete term `a` (a loss over its count of tokens, summed over the batch) to terms
whose sums are pending. `partialize` gives it to one micro-batch, which would need `a` before the last one.
The ops between it and the sum are linear in their pending operands: a result is pending only for these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.layout import Sharding
from tutti.pipeline.micro_batches.over_time import MICRO, sums_over_time

_PENDING = (MICRO, "sum")


def add_complete_terms_once(graph: fx.Graph) -> None:
    """Rewrite `graph` so that complete terms join a sum over the micro-batches after it."""
    through = _with_complete_terms(graph)
    summed = _summed(graph, through)
    totals: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n in summed]:
        if _is_complete(node):
            totals[node] = node.args[0]  # type: ignore[assignment]
            continue
        for x in node.all_input_nodes:
            if _is_pending(x) and x not in totals:
                totals[x] = _sum_after(graph, x)
        with graph.inserting_after(node):
            totals[node] = graph.node_copy(node, lambda x: totals.get(x, x))
        totals[node].meta["sharding"] = _added_up(node.meta["sharding"])
    for node in list(graph.nodes):
        if sums_over_time(node) and node.args[0] in summed:
            node.replace_all_uses_with(totals[node.args[0]])  # type: ignore[index]
            graph.erase_node(node)
    for node in reversed(through):
        if not node.users:
            graph.erase_node(node)


def _with_complete_terms(graph: fx.Graph) -> dict[fx.Node, None]:
    """The pending values with a complete term, in order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_complete(node) or (
            node.op == "call_function"
            and any(x in found for x in node.all_input_nodes)
            and _is_pending(node)
            and not any(MICRO in _sharding(x).axes for x in node.all_input_nodes)
        ):
            found[node] = None
    return found


def _summed(graph: fx.Graph, through: dict[fx.Node, None]) -> set[fx.Node]:
    """Those of `through` that a sum over the micro-batches adds up, by itself or as a term."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (sums_over_time(node) and node.args[2:] == ("sum",)) or (
            node in found and not _is_complete(node)
        ):
            found.update(x for x in node.all_input_nodes if x in through)
    return found


def _sum_after(graph: fx.Graph, x: fx.Node) -> fx.Node:
    with graph.inserting_after(x):
        total = graph.call_function(collectives.all_reduce, (x, (MICRO,), "sum"))
    total.meta = {**x.meta, "sharding": _added_up(x.meta["sharding"])}
    return total


def _is_complete(node: fx.Node) -> bool:
    return node.target is collectives.partialize and node.args[1:] == ((MICRO,), "sum")


def _is_pending(node: fx.Node) -> bool:
    return _PENDING in _sharding(node).partial and isinstance(node.meta.get("val"), Tensor)


def _sharding(node: fx.Node) -> Sharding:
    found: Any = node.meta.get("sharding")
    return found or Sharding(())


def _added_up(sharding: Sharding) -> Sharding:
    return sharding.with_partial(p for p in sharding.partial if p != _PENDING)
