"""The inputs of a graph that are state, which a step keeps for the next one."""

from __future__ import annotations

from torch import fx

STATE = frozenset({"parameter", "buffer", "slot"})


def is_state(node: fx.Node) -> bool:
    """Whether `node` is an input that holds a parameter, a buffer or a slot of the optimizer."""
    return node.op == "placeholder" and node.meta.get("kind") in STATE
