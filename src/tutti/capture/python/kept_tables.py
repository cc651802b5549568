"""Tables whose values a trace changes, and restores at its end: values, keys and their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from tutti.capture.python.held_values import (
    ITEM,
    MEMBER,
    MISSING,
    Table,
    TableEntry,
    move_to_end,
    plain_sequence,
    put_items,
)


class KeptTable:
    """A table with its values now."""

    def __init__(self, table: Table) -> None:
        held = table.find()
        self._table, self._values, self._keys = table, table.values(), all_keys(table)
        self._order = [*held] if has_order(table) else []
        of_items = table.kind == ITEM and isinstance(held, list | deque)
        # Of a list, to restore it whole if its length changes.
        self._items = list(plain_sequence(held)) if of_items else None

    def put_back(self) -> None:
        """Restore everything, and remove what is new."""
        table, held = self._table, self._table.find()
        if self._items is not None:
            put_items(held, self._items)
            return
        gone = dict.fromkeys(self._values, MISSING)
        new = {key: held[key] for key in all_keys(table) if key not in self._keys}
        for key, value in {**gone, **table.values(), **new}.items():
            old = self._values.get(key, MISSING)
            if value is not old and not is_mode(TableEntry(table, key)):
                table.put(key, old)
        if self._order and not are_in_order(held, order := in_order(held, self._order)):
            for key in order:
                move_to_end(held, key)


def is_mode(entry: TableEntry) -> bool:
    """Whether an entry is a module's mode, which each call sets."""
    return entry.key == "training" and entry.table.kind == MEMBER


def is_list(table: Table) -> bool:
    return table.kind == ITEM and not isinstance(table.find(), dict)


def has_order(table: Table) -> bool:
    """Whether the order of its keys counts: a dict, no attributes."""
    return table.kind == ITEM and table.keys is None and isinstance(table.find(), dict)


def in_order(held: Collection[Any], order: Sequence[Any]) -> list[Any]:
    """The keys of a dict: first those of `order`, as there, then the others."""
    first = [key for key in order if key in held]
    known = {*first}
    return [*first, *(key for key in held if key not in known)]


def are_in_order(held: Collection[Any], order: Sequence[Any]) -> bool:
    """Whether a dict has the keys `order`, in this order."""
    return [*map(id, held)] == [*map(id, order)]


def all_keys(table: Table) -> dict[Any, None]:
    """All keys of a dict, also those that no code mentions, in an order that is the same on every rank."""
    held = table.find()
    every = isinstance(held, dict) and table.kind in (ITEM, MEMBER)
    return dict.fromkeys(key for key in held if key not in table.ignored) if every else {}
