"""The nodes that draw random numbers: a whole tensor, or a rank's part of one."""

from __future__ import annotations

from torch import fx

from tutti.graph.ops.collectives import draw_part
from tutti.graph.randomness.draw import draw


def is_draw(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return node.target in (draw, draw_part)
