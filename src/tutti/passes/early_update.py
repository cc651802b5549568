"""`early_update`: updates a weight right after its gradient, not after the whole backward.

    backward   %7 = mm(%5, %x2)                       backward   %7 = mm(%5, %x2)
               %8 = mm(%6, %x1)              ->       update     %9 = adamw([%w2], [%7], ...)
    update     %9 = adamw([%w2], [%7], ...)           backward   %8 = mm(%6, %x1)
               %10 = adamw([%w1], [%8], ...)          update     %10 = adamw([%w1], [%8], ...)

So the update reads a gradient while it is in the cache, and few gradients are alive at once: later ones reuse
their memory.

An op of the update moves up behind its last operand, and behind all readers of the old value of its state.
Ops that need every gradient stay, such as those after a global norm. So do collectives between hosts or GPUs:
`overlap` runs these beside the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import fx

from tutti.graph.analysis.aliases import aliased, written
from tutti.graph.analysis.order import positions_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.passes.target import Target

# Ops that all ranks of a group, or all pipeline ranks, must run in one order.
_ORDERED = {
    *collectives.COLLECTIVES,
    *collectives.JOINED,
    collectives.finish,
    collectives.buffer,
    collectives.send,
    collectives.receive,
    loop,
}


def early_update(graph: fx.Graph, target: Target) -> int:
    """Reorder `graph`; returns the number of nodes moved.

    A graph with in-place ops stays unchanged: its edges do not give all of its order.
    """
    if any(map(written, graph.nodes)):
        return 0
    order = positions_of(graph)
    at = _positions(graph, order, _movable(graph, target))
    nodes = sorted(order, key=lambda n: (at.get(n, order[n]), n in at, order[n]))
    for before, node in pairwise(nodes):
        before.append(node)
    return sum(1 for i, node in enumerate(nodes) if order[node] != i)


def _movable(graph: fx.Graph, target: Target) -> set[fx.Node]:
    """The ops of the update without a collective, and without a wait for other hosts or GPUs."""
    found, waits = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(x in waits for x in node.all_input_nodes) or _comes_from_afar(node, target):
            waits.add(node)
        elif node.target not in _ORDERED and node.meta.get("region") == "update":
            found.add(node)
    return found


def _comes_from_afar(node: fx.Node, target: Target) -> bool:
    if node.target in (collectives.receive, collectives.start):
        return True
    meets = node.target in (*collectives.COLLECTIVES, collectives.together)
    return meets and collectives.axes_of(node) not in target.shared


def _positions(
    graph: fx.Graph, order: dict[fx.Node, int], movable: set[fx.Node]
) -> dict[fx.Node, int]:
    """The position behind which to put each of `movable`.

    A node that needs only inputs goes right before its first reader: earlier, it would only take memory.
    """
    at: dict[fx.Node, int] = {}
    ready: set[fx.Node] = set()  # of movable ones, those that need only inputs
    read_at: dict[fx.Node, list[int]] = {}  # positions of an input's readers that stay
    for node in graph.nodes:
        if node in movable:
            given = [x for x in node.all_input_nodes if x.op == "placeholder"]
            made = [at.get(x, order[x]) for x in node.all_input_nodes if x.op != "placeholder"]
            for x in given:
                if x not in read_at:
                    read_at[x] = [order[r] for r in _readers(x) if r not in movable]
            reads = [p for x in given for p in read_at[x]]
            at[node] = max((p for p in (*made, *reads) if p < order[node]), default=-1)
            if all(x.op == "placeholder" or x in ready for x in node.all_input_nodes):
                ready.add(node)
    for node in reversed(graph.nodes):
        if node in ready:
            first = min((at.get(u, order[u] - 1) for u in node.users), default=order[node])
            at[node] = max(at[node], first)
    return at


def _readers(x: fx.Node) -> Iterator[fx.Node]:
    """All readers of an input's memory, gathers that become views included."""
    for user in x.users:
        yield user
        if aliased(user) is x or user.target is collectives.all_gather:
            yield from _readers(user)
        elif user.target in (collectives.together, collectives.together_):
            kind, xs = user.args[:2]
            items: Any = user.users if kind == "all_gather" else ()
            for item in items:
                if xs[item.args[1]] is x:  # type: ignore[index]
                    yield item
                    yield from _readers(item)
