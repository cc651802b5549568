"""The inputs of the next step, after a step changes numbers and tensors in Python objects.

Comparisons play a captured step several times without the user's objects: its changes of them go into the
inputs of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tutti.calls.guards import guard_of
from tutti.capture.captured import Captured
from tutti.capture.python.effects import Effect, values_of


def following(
    captured: Captured, feed: Mapping[str, Any], returned: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The numbers and the batch of the next step, and the replacements of outside tensors."""
    numbers, tensors = dict(feed), dict[str, Tensor]()
    results = returned[captured.num_returned :]
    for effect, value in zip(captured.effects, values_of(captured.effects, results), strict=True):
        for name, new in _named(effect, value).items() if effect.num_leaves else ():
            if name in feed:
                numbers[name] = new
            elif name in captured.outside:
                tensors[name] = new
    return numbers, tensors


def _named(effect: Effect, value: Any) -> dict[str, Any]:
    """An effect's result for each input by name; each item for a tuple of options."""
    name = effect.entries[0].name
    if isinstance(value, list | tuple):
        return {f"{name}.{i}": x for i, x in enumerate(value)}
    return {name: value}


def plays_again(captured: Captured, feed: Mapping[str, Any]) -> bool:
    """Whether the next step is the same program with `feed`; else a call would trace again."""
    if captured.trained or captured.other_modes or not captured.gradients.may_repeat:
        return False
    known = {*feed, *captured.outside}
    if any(effect.removes or effect.moves for effect in captured.effects):
        return False
    both = zip(captured.effects, _shapes(captured), strict=True)
    inner = [_named(effect, value) for effect, value in both if effect.may_be_read]
    if not all(name in known for names in inner for name in names):
        return False
    numbers = {n: x for n, x in feed.items() if not isinstance(x, Tensor)}
    return guard_of(captured)(numbers)


def _shapes(captured: Captured) -> list[Any]:
    """The structure of each effect's values, without their leaves."""
    count = sum(e.num_leaves for e in captured.effects)
    return values_of(captured.effects, [None] * count)
