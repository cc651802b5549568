"""Positions in a graph: where a value is ready, its first use, its ancestors and descendants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable

from torch import fx

from tutti.graph.analysis.aliases import is_function, written
from tutti.graph.analysis.state import is_state
from tutti.graph.edits.edit import NOTES


def positions_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def ready_at(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """The position of the last operand of `node`: the earliest place for `node` is right behind it."""
    return max((order[x] for x in node.all_input_nodes), default=-1)


def used_at(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """The position of the first user of `node`: the latest place for `node` is right before it."""
    return min((order[user] for user in node.users), default=len(order))


def casts_of_state(node: fx.Node) -> list[fx.Node]:
    """The functions of one state tensor that make an operand, the first one first; they may run at any time.

    Empty if the operand depends on anything else, or if a node overwrites the state.
    """
    found: list[fx.Node] = []
    while is_function(node) and len(node.all_input_nodes) == 1:
        found.insert(0, node)
        (node,) = node.all_input_nodes
    return found if is_state(node) and not any(node in written(u) for u in node.users) else []


def late_casts(
    operands: Iterable[fx.Node], before: fx.Node, order: dict[fx.Node, int]
) -> list[fx.Node]:
    """The casts of state that make `operands` and come after `before`, in order."""
    casts = {x for operand in operands for x in casts_of_state(operand)}
    return sorted((x for x in casts if order[x] > order[before]), key=order.__getitem__)


def item(graph: fx.Graph, after: fx.Node, several: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """Result `index` of a node with several, placed behind `after`, with the notes of `like`."""
    with graph.inserting_after(after):
        node = graph.call_function(operator.getitem, (several, index))
    node.meta = {k: like.meta[k] for k in (*NOTES, "val", "sharding") if k in like.meta}
    return node


def sole_readers(
    x: fx.Node,
    ends: Callable[[fx.Node], bool] = lambda node: True,
    inside: Callable[[fx.Node], bool] = lambda node: True,
) -> list[fx.Node]:
    """The nodes behind `x` that depend on it alone, each the only reader of the one before, in order, as long
    as `inside` holds, up to the last one for which `ends` holds."""
    chain, node = list[fx.Node](), x
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op != "call_function" or user.all_input_nodes != [node] or not inside(user):
            break
        chain.append(user)
        node = user
    while chain and not ends(chain[-1]):
        chain.pop()
    return chain


def ancestors(
    starts: Iterable[fx.Node],
    inside: Callable[[fx.Node], bool] = lambda node: True,
    *,
    given: Container[fx.Node] = (),
) -> set[fx.Node]:
    """`starts` and their ancestors, as far as `inside` holds; the ancestors of `given` do not count."""
    todo = list(starts)
    found = set(todo)
    while todo:
        node = todo.pop()
        for x in () if node in given else node.all_input_nodes:
            if x not in found and inside(x):
                found.add(x)
                todo.append(x)
    return found


def ancestors_where(
    starts: Iterable[fx.Node], holds: Callable[[fx.Node], bool]
) -> set[fx.Node] | None:
    """`ancestors(starts)` if `holds` is true of all of them; ends at the first of which it is not."""
    return _reached(starts, lambda node: node.all_input_nodes, holds)


def descendants_where(
    starts: Iterable[fx.Node], holds: Callable[[fx.Node], bool]
) -> set[fx.Node] | None:
    """`starts` and their descendants, if `holds` is true of all; ends at the first of which it is not."""
    return _reached(starts, lambda node: node.users, holds)


def _reached(
    starts: Iterable[fx.Node],
    near: Callable[[fx.Node], Iterable[fx.Node]],
    holds: Callable[[fx.Node], bool],
) -> set[fx.Node] | None:
    todo = list(starts)
    found = set(todo)
    while todo:
        node = todo.pop()
        if not holds(node):
            return None
        new = [x for x in near(node) if x not in found]
        found.update(new)
        todo += new
    return found
