"""Reads several values of many tables by few calls: a step begins with cold caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import is_, itemgetter
from typing import Any

Table = Mapping[Any, Any]
Reader = Callable[[Table], tuple[Any, ...]]


@cache
def reader(keys: tuple[str, ...]) -> Reader:
    """A function that reads the values under `keys` from a table; raises `KeyError` for a missing one."""
    if len(keys) > 1:  # for one key it would return the bare value
        return itemgetter(*keys)
    return lambda table: tuple([table[key] for key in keys])


def read(readers: Iterable[Reader], tables: Iterable[Table]) -> list[Any]:
    """The values of each reader from its table; raises `KeyError`."""
    found = [one(table) for one, table in zip(readers, tables, strict=True)]
    return [*chain.from_iterable(found)]


def values_of(tables: Iterable[Table]) -> list[Any]:
    """The values of all `tables`, one table after the other."""
    return [*chain.from_iterable([table.values() for table in tables])]


def are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are identical objects, in the same order."""
    return len(now) == len(before) and all(map(is_, now, before))
