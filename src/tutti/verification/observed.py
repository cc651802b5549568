"""A partitioned program that also returns each rank's inputs of its updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tutti.graph.edits.edit import source_of
from tutti.layout import Sharding
from tutti.partition.partition import Program


@dataclass(frozen=True)
class Observed:
    """`program` returns `gradients` after its own results.

    gradients: by a name to show, the name of the value in the captured graph, and its sharding.
    """

    program: Program
    gradients: dict[str, tuple[str, Sharding]]


def observed(program: Program) -> Observed:
    """`program`, rewritten in a new graph: the same ops, without further collectives."""
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
    """A value's name for a reader: its source line, made unique among values of that line."""
    name = f"%{value} at {source_of(mark.all_input_nodes[0])}"
    return name if name not in known else f"{name} ({len(known)})"
