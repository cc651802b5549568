"""Casts of gradients to half precision and back, such as those of a mask that autocast narrows.

    %2: f32 = sum(%1, [0])               over the samples: each rank has a part
    %3: bf16 = _to_copy(%2)
    %4: f32 = _to_copy(%3)         ->    the readers of %4 read %2

A cast that rounds must follow the sum over ranks, so each layer would move its part of a gradient that all
layers add up, such as that of T5's relative positions. Without the round trip the parts add up first.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.capture.spelling.rewrites import narrows

_CAST = torch.ops.aten._to_copy.default


def without_round_trips(graph: fx.Graph) -> None:
    """Let readers of a gradient that was cast to half precision and back read it as it was."""
    casts = [n for n in graph.nodes if n.target is _CAST and n.meta.get("region") == "backward"]
    for node in reversed(casts):  # before the casts that it reads
        (given,) = node.all_input_nodes
        back = [u for u in node.users if u.target is _CAST and _dtype(u) == _dtype(given)]
        if back and len(back) == len(node.users) and narrows(given, node):
            for wide in back:
                wide.replace_all_uses_with(given)
                graph.erase_node(wide)
            graph.erase_node(node)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
