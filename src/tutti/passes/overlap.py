"""`overlap`: starts collectives between hosts or GPUs early, and waits for them late.

    %8 = together(reduce_scatter, [%3, %6], data, ...)      %8 = start(reduce_scatter, [%3, %6], data, ...)
    ...                                                ->   ...
    %20 = adamw([%w], [item(%8, 0)], ...)                   %19 = finish(%8, [%3, %6])
                                                            %20 = adamw([%w], [item(%19, 0)], ...)

A reduction starts where its operands are ready and ends right before the first use of its result. A
reduce-scatter, and an all-reduce whose results leave the graph, ends at the start of the next one at the
latest, so whole gradients do not wait for the update: one bucket of them is in progress while the backward
makes another. A gather starts right before the end of
the previous one, so that one is in progress while another is in use: at most two are alive at a time.

Ranks of one host that share memory have nothing to overlap: their own cores move the bytes.
"""

from __future__ import annotations

from torch import fx

from tutti.graph.analysis.collective_scratch import BEGUN
from tutti.graph.analysis.cost import flops_of
from tutti.graph.analysis.order import late_casts, positions_of
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.passes.joined import as_together, is_kind
from tutti.passes.target import Target

# The least number of nodes in between that pays for a start and a finish; one matmul pays, too.
LEAST_GAP = 3


def overlap(graph: fx.Graph, target: Target) -> int:
    """Rewrite `graph`; returns the number of collectives that now run beside other work."""
    count = 0
    last_gather: dict[tuple[str, ...], fx.Node] = {}
    last_freeing: dict[tuple[str, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if not is_kind(node, "all_gather", "reduce_scatter", "all_reduce"):
            continue
        axes = collectives.axes_of(node)
        if axes in target.shared or not node.users:
            continue
        gathers = is_kind(node, "all_gather")
        node = as_together(graph, node)
        begin = _begin(graph, node, last_gather.get(axes) if gathers else None)
        first_user = _first_user(graph, node)
        frees = is_kind(node, "reduce_scatter") or (not gathers and first_user.op == "output")
        if _pays(begin, first_user):
            node = _split(graph, node, begin, first_user)
            count += 1
        if gathers:
            last_gather[axes] = node
        if frees:
            if axes in last_freeing:
                _end_before(graph, last_freeing[axes], _started(node))
            last_freeing[axes] = node
    return count


def _started(node: fx.Node) -> fx.Node:
    """The start of a collective: itself, if it has no start of its own."""
    if node.target is collectives.finish:
        start = node.args[0]
        assert isinstance(start, fx.Node), node
        return start
    return node


def _end_before(graph: fx.Graph, node: fx.Node, later: fx.Node) -> None:
    """Move the end of a collective and its results before `later`, if they come after it."""
    order = positions_of(graph)
    if node.target is collectives.finish and order[later] < order[node]:
        for moved in (node, *sorted(node.users, key=order.__getitem__)):
            later.prepend(moved)


def _begin(graph: fx.Graph, node: fx.Node, earlier: fx.Node | None) -> fx.Node:
    """The node before which the collective may start: itself, or the end of the gather before it.

    Casts of weights move there with their gather.
    """
    if earlier is None:
        return node
    order = positions_of(graph)
    late = late_casts(node.all_input_nodes, earlier, order)
    if any(order[x] >= order[earlier] and x not in late for x in node.all_input_nodes):
        return node
    for x in late:
        earlier.prepend(x)
    return earlier


def _first_user(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first node that uses a result."""
    order = positions_of(graph)
    return min((u for item in node.users for u in item.users), key=order.__getitem__)


def _pays(begin: fx.Node, first_user: fx.Node) -> bool:
    """Whether there is work to do between the two nodes; `begin` itself may be the collective."""
    node, gap = begin, 0
    while node is not first_user:
        gap += 1
        if gap > LEAST_GAP or flops_of(node):
            return True
        node = node.next
    return False


def _split(graph: fx.Graph, node: fx.Node, begin: fx.Node, first_user: fx.Node) -> fx.Node:
    notes = {k: node.meta[k] for k in NOTES if k in node.meta}
    with graph.inserting_before(begin):
        start = graph.call_function(collectives.start, node.args)
    start.meta = notes | {"val": None, BEGUN: node.meta["val"]}
    with graph.inserting_before(first_user):
        finish = graph.call_function(collectives.finish, (start, node.args[1]))
    finish.meta = notes | {"val": node.meta["val"]}
    items = sorted(node.users, key=lambda user: int(user.args[1]))  # type: ignore[arg-type]
    for item in reversed(items):
        item.args = (finish, item.args[1])
        finish.append(item)
    graph.erase_node(node)
    return finish
