"""What is gathered of weights that ranks keep in parts (`zero=3`), and when.

With stages, the action `G` of a stage gathers all its weights; the schedule says where in the row, and how
often. Without stages each micro-batch gathers a weight where it needs it, so that no rank holds all of them.
"""

from __future__ import annotations

from torch import fx

from tutti.graph.ops import collectives
from tutti.pipeline.micro_batches.moments import BEFORE, Moments
from tutti.pipeline.micro_batches.over_time import MICRO


def gathered(moments: Moments) -> set[fx.Node]:
    """What is made of gathered weights, and of nothing that the batch has a part in."""
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
    """Let the forward and the backward read one gathered weight: between them it is kept anyway."""
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
