"""The gathers of weights that ranks keep in parts (`zero=3`), and their times.

With stages, the action `G` of a stage gathers all its weights, at its positions in the schedule's row.
Without stages each micro-batch gathers a weight at its use, so that no rank holds all of them.
"""

from __future__ import annotations

from torch import fx

from tutti.graph.ops import collectives
from tutti.pipeline.micro_batches.moments import BEFORE, Moments
from tutti.pipeline.micro_batches.over_time import MICRO


def gathered(moments: Moments) -> set[fx.Node]:
    """The nodes that depend on gathered weights, and not on the batch."""
    early = {total for level in moments.early for total in level}
    found: set[fx.Node] = set()
    for node in moments.graph.nodes:
        if moments.when[node] != BEFORE or node not in moments.stateful or node in early:
            continue
        if _gathers(node) or any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _gathers(node: fx.Node) -> bool:
    return node.target is collectives.all_gather and MICRO not in collectives.axes_of(node)


def gather_once(moments: Moments) -> None:
    """Let the forward and the backward read one gathered weight, which stays between them anyway."""
    first: dict[str, fx.Node] = {}
    found = gathered(moments)
    for node in list(moments.graph.nodes):
        if node not in found:
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            moments.graph.erase_node(node)
            moments.forget(node)
