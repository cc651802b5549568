"""Recomputed values of the forward, in stages that already have the originals.

stage 0   x1 = f(x0)    recomputed as r1 for the backward of stage 0
stage 1   reads x1, received from stage 0: its backward reads x1, too, never r1
"""

from __future__ import annotations

from torch import fx

from tutti.graph.edits.edit import RECOMPUTED
from tutti.pipeline.micro_batches.moments import Moments


def originals(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each recomputed node to its original in the forward, if that still exists."""
    named = {n.name: n for n in graph.nodes}
    again = ((n, named.get(n.meta[RECOMPUTED])) for n in graph.nodes if RECOMPUTED in n.meta)
    return {n: first for n, first in again if first is not None}


def read_what_is_there(moments: Moments, stage: dict[fx.Node, int]) -> None:
    """Let later stages read values received in the forward; drop recomputed values without a reader."""
    found = originals(moments.graph)
    for node, first in found.items():
        if node not in stage or first not in stage:
            continue
        for user in list(node.users):
            if stage.get(user, stage[node]) > stage[node]:
                user.replace_input_with(node, first)
    for node in reversed(found):
        if not node.users:
            moments.graph.erase_node(node)
            moments.forget(node)
            stage.pop(node, None)
