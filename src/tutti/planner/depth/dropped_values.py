"""The values of a layer that a budget of `remat` may drop, and the seconds to recompute them.

    a layer keeps     x  norm  q  k  v  mixed  gate  up  product        bytes of each
    by worth          norm, product, q, ...                             bytes / seconds to make it again
    a share drops     as many from the front as it needs, of every layer alike

Recomputing a value also makes the dropped values that it is made from, each once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import fx

from tutti.passes.recompute import is_recomputable


class Drop(NamedTuple):
    """A value that a layer may drop: its bytes, and the seconds to make it again."""

    nbytes: float
    seconds: float


def drops_of(
    values: Mapping[fx.Node, float], seconds: Mapping[fx.Node, float], inside: Collection[fx.Node]
) -> tuple[Drop, ...]:
    """The droppable values of a unit in the order of their worth.

    Args:
        values: bytes of the values that the backward reads; none that a later unit reads, too.
        seconds: of each kernel, by its last node.
        inside: the nodes of the unit; others are at hand.
    """

    def chain(value: fx.Node, kept: Collection[fx.Node]) -> set[fx.Node]:
        """The nodes to run again, back to values at hand."""
        found, stack = set[fx.Node](), [value]
        while stack:
            node = stack.pop()
            at_hand = node is not value and node in kept
            if node in found or at_hand or node not in inside or not is_recomputable(node):
                continue
            found.add(node)
            stack += node.all_input_nodes
        return found

    def total(nodes: Collection[fx.Node]) -> float:
        return sum(seconds.get(n, 0.0) for n in nodes)

    droppable = [v for v in values if is_recomputable(v)]
    alone = {v: total(chain(v, values)) for v in droppable}
    kept, again, made = set(values), set[fx.Node](), list[Drop]()
    for value in sorted(droppable, key=lambda v: alone[v] / max(1.0, values[v])):
        kept.discard(value)
        more = chain(value, kept) - again
        again |= more
        made.append(Drop(values[value], total(more)))
    return tuple(made)
