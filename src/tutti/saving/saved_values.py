"""Python values in checkpoints: the counts, switches and tensors outside of the model that steps change."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutti.calls.python_values import PythonValues
from tutti.capture.python.held_values import ITEM, MEMBER, MISSING, TableEntry, named
from tutti.capture.python.plain_values import is_plain_number
from tutti.errors import CheckpointError
from tutti.saving import value_trees

# The prefix of the names of entries, which could equal those of weights.
PREFIX = "python."


def to_save(values: PythonValues) -> dict[str, Tensor]:
    """The Python values that the step changes, as tensors: numbers and switches without dims."""
    found: dict[str, Tensor] = {}
    if not values.changed:
        return found
    values.walk()
    for name, entry in _entries(values).items():
        if name not in values.changed or name in values.findings.appended:
            continue
        value = entry.get()
        if isinstance(value, Tensor):
            found[PREFIX + name] = value.detach()
        elif isinstance(value, bool) or is_plain_number(value):
            kind = next(t for t in value_trees.NUMBERS if isinstance(value, t))
            found[PREFIX + name] = torch.tensor(value, dtype=value_trees.NUMBERS[kind])
        elif isinstance(value, tuple | list | dict):
            found |= value_trees.flat(PREFIX + name, value)
    for name in values.removed - _entries(values).keys():
        found |= value_trees.flat(PREFIX + name, MISSING)
    return found


def check(values: PythonValues, saved: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for a value without an entry in this step."""
    values.walk()
    there = (name for name in saved if not value_trees.is_gone(name))
    for name in {value_trees.name_of(name).removeprefix(PREFIX): None for name in there}:
        if _entry(values, name) is None:
            raise CheckpointError(
                f'the checkpoint has a value for "{name}", which the step lacks',
                at=where,
                why="a step's counts and tensors outside of its model are part of its state",
                fix="the step, and what it reaches, as when it was saved",
            )


def put(values: PythonValues, saved: Mapping[str, Tensor]) -> None:
    """Restore the saved values in their places.

    Raises:
        CheckpointError: a named tuple in the place of another value.
    """
    values.walk()
    trees: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        trees.setdefault(value_trees.name_of(name), {})[name] = value
    with torch.no_grad():
        for name, inner in trees.items():
            entry = _entry(values, name.removeprefix(PREFIX))
            gone = all(map(value_trees.is_gone, inner))
            if entry is None and gone:
                continue
            assert entry is not None  # by `check`
            values.changed.add(entry.name)
            old, value = entry.get(), inner.get(name)
            if gone:
                values.removed.add(entry.name)
            if value is None:
                entry.put(value_trees.built(inner, old))
            elif isinstance(old, Tensor) and old.shape == value.shape:
                old.copy_(value)
            elif (
                value.dim()
                or isinstance(old, Tensor)
                or value.dtype not in value_trees.NUMBERS.values()
            ):
                entry.put(value.clone())
            else:
                entry.put(value.item())


def _entry(values: PythonValues, name: str) -> TableEntry | None:
    """The entry of a value of this name, also a future one: a dict may lack the key before the first call."""
    known = _entries(values)
    if name in known:
        return known[name]
    for table in values.state.tables:
        rest = name.removeprefix(table.prefix)
        if rest == name or not isinstance(table.find(), dict):
            continue
        if table.kind == MEMBER and rest.isidentifier():
            return TableEntry(table, rest)
        if table.kind == ITEM and rest[:1] + rest[-1:] == "[]":
            with contextlib.suppress(ValueError, SyntaxError):
                return TableEntry(table, ast.literal_eval(rest[1:-1]))
    return None


def _entries(values: PythonValues) -> dict[str, TableEntry]:
    every = [
        (name, entry) for name, entry, value in named(values.state.tables) if value is not MISSING
    ]
    return dict(reversed(every))
