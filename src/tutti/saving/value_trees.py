"""Tuples, lists and dicts of tensors and numbers as tensors with names, from which they can be made again.

python.kept           a tensor, or a number without dims, as it is
python.kept@@(0:2     item 0 of a tuple of 2;  [ of a list, < of a named tuple
python.kept@@{'h'     the value under a key of a dict
python.kept@@(1:2@@int    a number inside;  @@float, @@bool, @@none, @@text
python.kept@@gone     no value: the step has removed it
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.held_values import MISSING
from tutti.errors import CheckpointError

MARK = "@@"
_GONE = f"{MARK}gone"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_BY_NAME = {kind.__name__: kind for kind in NUMBERS}


def flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value, by name; an empty one where no tensor can hold it (a function, a dtype)."""
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif value is None:
        yield f"{name}{MARK}none", torch.zeros(0)
    elif value is MISSING:
        yield f"{name}{_GONE}", torch.zeros(0)
    elif type(value) is str:
        yield f"{name}{MARK}text", torch.tensor([*value.encode()], dtype=torch.uint8)
    elif type(value) in NUMBERS:
        yield (
            f"{name}{MARK}{type(value).__name__}",
            torch.tensor(value, dtype=NUMBERS[type(value)]),
        )
    elif isinstance(value, tuple | list):
        kind = "<" if hasattr(value, "_make") else "(" if isinstance(value, tuple) else "["
        if not value:
            yield f"{name}{MARK}{kind}:0", torch.zeros(0)
        for i, x in enumerate(value):
            yield from flat(f"{name}{MARK}{kind}{i}:{len(value)}", x)
    elif type(value) is dict:
        if not value:
            yield f"{name}{MARK}{{", torch.zeros(0)
        for key, x in value.items():
            yield from flat(f"{name}{MARK}{{{key!r}", x)
    else:
        yield f"{name}{MARK}other", torch.zeros(0)


def name_of(name: str) -> str:
    """The name of the whole value."""
    return name.partition(MARK)[0]


def is_gone(name: str) -> bool:
    """Whether the tensor of this name stands for a value that the step has removed."""
    return name.endswith(_GONE)


def built(saved: Mapping[str, Tensor], old: Any) -> Any:
    """The value whose tensors are `saved`, by their names; `old` is the one in its place.

    Raises:
        CheckpointError: a named tuple, if `old` is none of as many fields; a value that no tensor can hold,
            if `old` has none there.
    """
    return _built(
        [(name.split(MARK)[1:], x) for name, x in saved.items()], old, name_of(next(iter(saved)))
    )


def _built(parts: Sequence[tuple[list[str], Tensor]], old: Any, name: str) -> Any:
    path, x = parts[0]
    if not path:
        return x.clone()
    if path[0] == "none":
        return None
    if MARK + path[0] == _GONE:
        return MISSING
    if path[0] == "other":
        if old is None:
            raise CheckpointError(
                f'"{name}" holds a value that no checkpoint has, and the step has none in its place',
                why="a checkpoint has tensors, numbers and texts",
                fix="begin with a value of the same form",
            )
        return old
    if path[0] == "text":
        return bytes(x.tolist()).decode()
    if path[0] in _BY_NAME:
        return _BY_NAME[path[0]](x.item())
    groups: dict[str, list[tuple[list[str], Tensor]]] = {}
    for (first, *rest), value in parts:
        groups.setdefault(first[1:], []).append((rest, value))
    if path[0][0] == "{":
        keys = {key: ast.literal_eval(key) for key in groups if key}
        olds = old if isinstance(old, dict) else {}
        return {k: _built(groups[key], olds.get(k), name) for key, k in keys.items()}
    count = int(path[0].partition(":")[2])
    before = list(old) if isinstance(old, tuple | list) and len(old) == count else [None] * count
    items = [_built(groups[f"{i}:{count}"], before[i], name) for i in range(count)]
    if path[0][0] != "<":
        return tuple(items) if path[0][0] == "(" else items
    make = getattr(old, "_make", None)
    if make is None or len(old) != count:
        raise CheckpointError(
            f'the checkpoint has a named tuple for "{name}", and the step has a {type(old).__name__} there',
            why="a checkpoint holds no classes",
            fix="begin with a named tuple in its place",
        )
    return make(items)
