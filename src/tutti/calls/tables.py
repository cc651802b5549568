"""Several values of many tables, read by few calls: a step begins with all of it out of the caches."""

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
    """What reads the values under `keys` from a table; raises `KeyError` where one is not there."""
    if len(keys) > 1:  # of one key it would give the value alone
        return itemgetter(*keys)
    return lambda table: tuple([table[key] for key in keys])


def read(readers: Iterable[Reader], tables: Iterable[Table]) -> list[Any]:
    """What each reader reads from its table; raises `KeyError`."""
    found = [one(table) for one, table in zip(readers, tables, strict=True)]
    return [*chain.from_iterable(found)]


def values_of(tables: Iterable[Table]) -> list[Any]:
    """The values of all `tables`, one table after the other."""
    return [*chain.from_iterable([table.values() for table in tables])]


def are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are the very same objects, in the same order."""
    return len(now) == len(before) and all(map(is_, now, before))
