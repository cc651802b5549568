"""How long each value of a graph is needed."""

from __future__ import annotations

from torch import fx


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nobody needs after it; what the output needs lives on."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for x in (*node.all_input_nodes, node):
            if x not in seen and node.op != "output":
                last.setdefault(node, []).append(x)
            seen.add(x)
    return last
