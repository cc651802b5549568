"""Values that a step leaves in Python, where servers keep its weights: logs, meters, the last loss.

Servers keep no such value, so each worker has its own: of the whole batch where workers make updates
together, of its own rows where they are apart, as the returned loss. That is right unless the next call
computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from tutti.calls.guards import symbols_of
from tutti.capture.captured import Captured
from tutti.capture.python.effects import Effect, values_of
from tutti.errors import CaptureError
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import source_of
from tutti.user_lines import quoted


def refuse_where_served(captured: Captured) -> None:
    """Raise `CaptureError` if a call computes weights, or takes a branch, by what the last one has left."""
    for name in captured.updated:
        if name in captured.outside:
            raise CaptureError(
                f"the step changes {name} in Python, and servers keep its weights",
                why="it writes into a tensor outside of its model; each worker would have one of its own",
                fix="another tensor at each call (log[...] = x), or a buffer of the model; or a layout "
                "without server",
            )
    for one in captured.drawn.numbers[:1]:
        raise CaptureError(
            f"the step draws random numbers from {one.draw.source}, and servers keep its weights",
            at=quoted(one.at),
            why="each worker would draw numbers of its own",
            fix="torch.rand and the like; or draw before the step and hand them over as arguments; or a "
            "layout without server",
        )
    leaves = [*captured.output[1], *captured.output[0][captured.num_results :]]
    computing = ancestors(x for x in leaves if isinstance(x, fx.Node))
    asked = {str(s) for expr in captured.guards for s in expr.free_symbols}
    deciding = {name for s, name in symbols_of(captured).items() if str(s) in asked}
    for effect, leaves in _left(captured):
        name = effect.entries[0].name
        for at in _read_again(captured, effect):
            node = captured.placeholder(at)
            users = [x for x in node.users if x in computing]
            if users or at in deciding:
                raise _refused(name, quoted(source_of(users[0])) if users else "")
        if any(isinstance(x, fx.Node) for x in leaves) and _has_tuple(effect):
            raise _refused(name, "")


def _left(captured: Captured) -> Iterator[tuple[Effect, list[Any]]]:
    """The effects whose values later calls may read, and their leaves."""
    leaves, at = captured.output[0], captured.num_returned
    for effect in captured.effects:
        if effect.may_be_read:
            yield effect, leaves[at : at + effect.num_leaves]
        at += effect.num_leaves


def _read_again(captured: Captured, effect: Effect) -> list[str]:
    """The inputs of the next call in the places of an effect: its value, or one in it."""
    names = [entry.name for entry in effect.entries]
    one = {n.name for n in captured.numbers if any(e.name in names for e in n.entries)}
    return [
        n
        for n in captured.inputs
        if n in one or any(n == name or n.startswith((f"{name}.", f"{name}[")) for name in names)
    ]


def _has_tuple(effect: Effect) -> bool:
    """Whether a value is or has a tuple: its items are constants of the next trace, which may read them."""
    (value,) = values_of([effect], [None] * effect.num_leaves)
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, tuple):
            return True
        todo += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    return False


def _refused(name: str, at: str) -> CaptureError:
    return CaptureError(
        f"the step reads {name}, which its last call has left there, and servers keep its weights",
        at=at,
        why="servers keep no Python values: each worker has one of its own, and updates would follow it",
        fix="write values that the step does not read to compute (a log); or a buffer of the model; or a "
        "layout without server",
    )
