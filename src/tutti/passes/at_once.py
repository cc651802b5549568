"""`regather` and `reduce_scatter`: rewrites that partition already makes, and their inverses.

Partition's routes are the cheapest already, so later fusion has no work. `TUTTI_WITHOUT` with one of these
names undoes it, which shows its gain.

`regather`: the program gathers a sharded weight for the forward, drops it, and gathers it for the backward.

    %3 = all_gather(%w, data, 0, 1)   forward               %3 = all_gather(%w, data, 0, 1)
    ...                                         without ->  ...
    %9 = all_gather(%w, data, 0, 1)   backward              (%3 is held for the backward)

`reduce_scatter`: reduces a pending sum of which each rank needs a part.

    %5 = reduce_scatter(%4, data, 0, 1, sum)    without ->  %5 = all_reduce(%4, data, sum)
                                                            %6 = shard(%5, data, 0, 1)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tutti.graph.ops import collectives


def gathered_once(graph: fx.Graph) -> int:
    """Let the backward use the forward's gathered weights; returns the number of gathers removed."""
    found: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target is not collectives.all_gather:
            continue
        same = found.setdefault(node.args, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            count += 1
    return count


def reduced_then_split(graph: fx.Graph) -> int:
    """Reduce to every rank, then let each keep its part; returns the number of reductions rewritten."""
    nodes = [n for n in graph.nodes if n.target is collectives.reduce_scatter]
    for node in nodes:
        x, axes, dim, outer, op = node.args
        with graph.inserting_before(node):
            whole = graph.call_function(collectives.all_reduce, (x, axes, op))
            part = graph.call_function(collectives.shard, (whole, axes, dim, outer))
        assert isinstance(x, fx.Node)
        whole.meta = {**node.meta, "val": x.meta["val"]}
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return len(nodes)
