"""Which places in Python have one tensor, or tensors of one memory: before a trace, and at its end.

A step may put one tensor into several places (`other.n = self.n`), or one that it has found there. After
each call these places have one tensor, too. A trace is valid for calls in which the same places share their
tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.held_values import TableEntry
from tutti.torch_private.storages import memory_id


class Sharing:
    """The tensors so far, each by the name of its first place."""

    def __init__(self) -> None:
        self._objects: dict[int, Hashable] = {}
        self._memory: dict[int, Hashable] = {}

    def of(self, name: Hashable, x: Tensor) -> tuple[Hashable, ...]:
        """The first places of the same tensor, and of one in the same memory; nothing for the first."""
        first = self._objects.setdefault(id(x), name)
        memory = self._memory.setdefault(memory_id(x) if _has_memory(x) else id(x), name)
        return () if name is first and name is memory else (first, memory)


def sharing_of(tensors: Iterable[Any]) -> list[tuple[Hashable, ...]]:
    """Which of these values are one tensor, or share memory."""
    known = Sharing()
    return [known.of(i, x) if isinstance(x, Tensor) else () for i, x in enumerate(tensors)]


@dataclass(frozen=True)
class Label:
    """The tensor of a leaf, and the first one of the same memory and form.

    Each is an entry where the step has found it, or the number of a leaf.
    """

    tensor: TableEntry | int
    memory: TableEntry | int

    def as_text(self) -> str:
        """The same for equal labels of two traces."""
        both = self.tensor, self.memory
        return str([x.name if isinstance(x, TableEntry) else x for x in both])


class Labels:
    """Labels for the leaves of what a step leaves.

    Args:
        found: by id of the tensors that stand in for those outside of the state, their entries.
        stand_ins: these tensors.
    """

    def __init__(
        self, found: Mapping[int, TableEntry], stand_ins: Iterable[Tensor], leaves: Sequence[Any]
    ) -> None:
        self._tensors: dict[int, TableEntry | int] = {}
        self._memory: dict[Any, TableEntry | int] = {}
        for x in stand_ins:
            self._note(x, found[id(x)])
        before, tensors = len(self._memory), [x for x in leaves if isinstance(x, Tensor)]
        for i, x in enumerate(tensors):
            self._note(x, i)
        new = len(self._memory) - before
        self._is_needed = new < len(tensors)

    def _note(self, x: Tensor, place: TableEntry | int) -> None:
        self._memory.setdefault(_form(x), self._tensors.setdefault(id(x), place))

    def of(self, leaves: Sequence[Any]) -> tuple[Label | None, ...]:
        """A label for each tensor among `leaves`; nothing for a step whose leaves share no tensor."""
        return tuple(map(self._label, leaves)) if self._is_needed else ()

    def _label(self, x: Any) -> Label | None:
        if not isinstance(x, Tensor):
            return None
        return Label(self._tensors[id(x)], self._memory[_form(x)])


def share(
    labels: Sequence[Label | None], leaves: Sequence[Any], made: dict[TableEntry | int, Any]
) -> list[Any]:
    """The leaves with one tensor for each label; `made` has those of earlier labels."""
    return [
        x if one is None else _made(one, x, made) for one, x in zip(labels, leaves, strict=True)
    ]


def _made(label: Label, x: Any, made: dict[TableEntry | int, Any]) -> Any:
    if label.tensor not in made:
        of_memory = made.get(label.memory)
        made[label.tensor] = of_memory.detach() if isinstance(of_memory, Tensor) else x
        made.setdefault(label.memory, made[label.tensor])
    return made[label.tensor]


def _has_memory(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided


def _form(x: Tensor) -> Any:
    """The memory of a tensor of a trace, and its part of the memory; the tensor where that is unknown."""
    if x.layout != torch.strided:
        return id(x)
    form = (*x.shape, *x.stride(), x.storage_offset())
    known = all(isinstance(n, int) for n in form)
    return (memory_id(x), x.dtype, x.dim(), *form) if known else id(x)
