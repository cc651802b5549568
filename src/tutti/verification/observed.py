"""A partitioned program that also returns the values that its updates take, as each rank has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tutti.graph.edits.edit import source_of
from tutti.layout import Sharding
from tutti.partition.partition import Program


@dataclass(frozen=True)
class Observed:
    """`program` returns `gradients` behind what it returned before.

    gradients: by a name to show, the name of the value in the captured graph, and how ranks hold it.
    """

    program: Program
    gradients: dict[str, tuple[str, Sharding]]


def observed(program: Program) -> Observed:
    """`program`, rewritten in a graph of its own: the same ops, nothing is moved for this."""
    holders: dict[fx.Node, tuple[fx.Node, Sharding]] = {}
    for value, node, sharding in program.made:
        holders.setdefault(value, (node, sharding))
    graph, mapped = fx.Graph(), {}
    both: Any = graph.graph_copy(program.graph, mapped)
    returned, updates = both
    gradients: dict[str, tuple[str, Sharding]] = {}
    seen: list[fx.Node] = []
    for mark, kind in program.plan.boundaries.items():
        if kind.into == "update" and mark in holders and holders[mark][0] in mapped:
            node, sharding = holders[mark]
            gradients[_shown(mark, kind.value, gradients)] = kind.value, sharding
            seen.append(mapped[node])
    graph.output(([*returned, *seen], updates))
    for old, new in mapped.items():
        new.meta = dict(old.meta)
    made = [(v, mapped[n], s) for v, n, s in program.made if n in mapped]
    return Observed(replace(program, graph=graph, made=made), gradients)


def _shown(mark: fx.Node, value: str, known: dict[str, tuple[str, Sharding]]) -> str:
    """What a reader knows a value by: its source line, told apart from others of that line."""
    name = f"%{value} at {source_of(mark.all_input_nodes[0])}"
    return name if name not in known else f"{name} ({len(known)})"
