"""What the next step begins with, where a step changes numbers and tensors that its Python holds.

Comparisons play a captured step several times without the user's objects: what it would leave in them goes
into the inputs of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tutti.calls.guards import guard_of
from tutti.capture.python.python_state import Effect, values_of
from tutti.capture.step import Captured


def following(
    captured: Captured, feed: Mapping[str, Any], returned: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The numbers and the batch of the next step, and tensors that take the place of others outside."""
    numbers, tensors = dict(feed), dict[str, Tensor]()
    results = returned[captured.num_returned :]
    for effect, value in zip(captured.effects, values_of(captured.effects, results), strict=True):
        for name, new in _named(effect, value).items():
            if name in feed:
                numbers[name] = new
            elif name in captured.outside:
                tensors[name] = new
    return numbers, tensors


def _named(effect: Effect, value: Any) -> dict[str, Any]:
    """By name of an input, what an effect makes of it; of a tuple of options each item."""
    name = effect.places[0].name
    if isinstance(value, list | tuple):
        return {f"{name}.{i}": x for i, x in enumerate(value)}
    return {name: value}


def plays_again(captured: Captured, feed: Mapping[str, Any]) -> bool:
    """Whether the next step is this program once more, with `feed`; else a call would trace again."""
    known = {*feed, *captured.outside}
    inner = [_named(e, v) for e, v in zip(captured.effects, _shapes(captured), strict=True)]
    if not all(name in known for names in inner for name in names):
        return False
    numbers = {n: x for n, x in feed.items() if not isinstance(x, Tensor)}
    return guard_of(captured)(numbers)


def _shapes(captured: Captured) -> list[Any]:
    """What each effect puts in its places, its leaves left open."""
    count = sum(e.num_leaves for e in captured.effects)
    return values_of(captured.effects, [None] * count)
