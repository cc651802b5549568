"""Joined collectives as one node: makes them, and takes them apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from tutti.graph.analysis.order import item
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.players.move import Move


def is_kind(node: fx.Node, *kinds: str) -> bool:
    """Whether `node` is a collective, or several joined, of one of `kinds`, such as "all_gather"."""
    if node.target is collectives.together:
        return node.args[0] in kinds
    return node.target in collectives.COLLECTIVES and node.target.__name__ in kinds  # type: ignore[union-attr]


def as_together(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A single collective as a `together` node of one."""
    if node.target is collectives.together:
        return node
    move = Move.of(node)
    args = (move.kind, [node.args[0]], move.axes, list(move.wheres), move.op)
    with graph.inserting_before(node):
        made = graph.call_function(collectives.together, args)
    made.meta = {k: node.meta[k] for k in NOTES if k in node.meta} | {"val": [node.meta["val"]]}
    node.replace_all_uses_with(item(graph, made, made, 0, node))
    graph.erase_node(node)
    return made


def take_out(
    graph: fx.Graph, node: fx.Node, chosen: Sequence[int], target: Any, args: tuple[Any, ...]
) -> fx.Node:
    """Let the members `chosen` of a `together` node be results of `target(*args)`, right before it.

    `node` keeps the others; without any it is erased.
    """
    kind, xs, axes, wheres, op = node.args
    values = node.meta["val"]
    with graph.inserting_before(node):
        made = graph.call_function(target, args)
    made.meta = {k: node.meta[k] for k in NOTES if k in node.meta}
    made.meta["val"] = [values[i] for i in chosen]
    rest = [i for i in range(len(values)) if i not in set(chosen)]
    for user in list(node.users):
        index: Any = user.args[1]
        taken = index in chosen
        user.args = (made, list(chosen).index(index)) if taken else (node, rest.index(index))
    if not rest:
        graph.erase_node(node)
    else:
        node.args = (kind, [xs[i] for i in rest], axes, [wheres[i] for i in rest], op)  # type: ignore[index]
        node.meta["val"] = [values[i] for i in rest]
    return made
