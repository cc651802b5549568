"""The weights and buffers that calls of steps change on each replica alone, by the modules that have them.

Several steps may change one tensor, also as parts of different models. All ranks make the same calls, so they
have the same marks. The slots of a weight differ where the weight does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from tutti.capture.state.lift import StateTensor


@dataclass(eq=False)
class Trainer:
    """A step, as the last that has trained a weight; `name` is that of its function."""

    name: str


# Of each module, by the name of a tensor: the last step that has trained it, if any has.
_MARKS: weakref.WeakKeyDictionary[nn.Module, dict[str, Trainer | None]] = (
    weakref.WeakKeyDictionary()
)


class _Takeovers:
    """Counts the weights that one step has begun to train after another."""

    count = 0


def num_takeovers() -> int:
    """How many weights steps have begun to train after other steps."""
    return _Takeovers.count


class LocalChanges:
    """Reads and writes the marks of one model's state; made for a use."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def mark_changed(self, state: Iterable[StateTensor]) -> None:
        """Note that replicas may differ in this state."""
        for marks, key in (place for s in state for place in self._places(s)):
            marks.setdefault(key, None)

    def mark_trained(self, state: Iterable[StateTensor], by: Trainer) -> None:
        """Note that a step trains these weights from now on."""
        for s in state:
            _Takeovers.count += self.trainer_of(s) not in (None, by)
            for marks, key in self._places(s):
                marks[key] = by

    def is_changed(self, s: StateTensor) -> bool:
        """Whether replicas may differ in a state tensor."""
        return any(key in marks for marks, key in self._places(s))

    def trainer_of(self, s: StateTensor) -> Trainer | None:
        """The last step that has trained a weight."""
        return next((by for marks, key in self._places(s) if (by := marks.get(key))), None)

    def _places(self, s: StateTensor) -> Iterator[tuple[dict[str, Trainer | None], str]]:
        for name in (s.owner or s.name, *s.others):
            path, _, key = name.rpartition(".")
            yield _MARKS.setdefault(self._modules[path], {}), key
