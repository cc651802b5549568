"""Containers in which a step looks parameters up: `p in frozen`, `names[p]`, `id(p) in skipped`.

A trace puts fakes in place of the state's tensors. It puts them into these containers, too: among the keys of
a dict, into sets and tuples, and the fakes' ids in place of the tensors'.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tutti.capture.python.held_values import ITEM, Table, named


class Identities:
    """The tensors of the state, by id, and what stands in for each."""

    def __init__(self, stand_ins: Mapping[int, Tensor]) -> None:
        self._stand_ins = stand_ins
        self._ids = {old: id(new) for old, new in stand_ins.items()}
        # The ids among the values: they count as long as their tensors exist.
        self.asked: set[int] = set()
        # By stand-in (of a tensor its id), the key in whose place it is.
        self._keys: dict[Any, Any] = {}

    def inside(self, value: Any) -> Any:
        """The stand-in for a tensor or an id; a tuple and its like with stand-ins; any other value itself."""
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if type(value) is int:
            if value in self._ids:
                self.asked.add(value)
            return self._ids.get(value, value)
        if type(value) is weakref.ref:
            held = value()
            new = self.inside(held) if isinstance(held, Tensor) else held
            return value if new is held else weakref.ref(new)
        if type(value) is functools.partial:
            args, named = self.inside(value.args), self.inside(tuple(value.keywords.values()))
            if args is value.args and all(
                a is b for a, b in zip(named, value.keywords.values(), strict=True)
            ):
                return value
            return functools.partial(
                value.func, *args, **dict(zip(value.keywords, named, strict=True))
            )
        if type(value) is frozenset or isinstance(value, tuple):
            items = [self.inside(x) for x in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            if hasattr(value, "_make"):  # a named tuple
                return value._make(items)  # type: ignore[union-attr]
            return type(value)(items)
        return value

    @contextlib.contextmanager
    def inside_of(self, tables: Sequence[Table]) -> Iterator[None]:
        """Inside, the values of `tables` have stand-ins; the end takes them out of keys alone."""
        renamed: list[dict[Any, Any]] = []
        try:
            for table in tables:
                if self._put_into_keys(table):
                    renamed.append(table.find())
            for _, entry, value in list(named(tables)):
                if isinstance(value, set):
                    self._put_into_set(value)
                elif entry.table.writable and (new := self.inside(value)) is not value:
                    entry.put(new)
            yield
        finally:
            for held in renamed:
                _rename(held, self.key)

    def _put_into_set(self, found: set[Any]) -> None:
        items = [self.inside(x) for x in found]
        if any(a is not b for a, b in zip(items, found, strict=True)):
            found.clear()
            found.update(items)

    def _put_into_keys(self, table: Table) -> bool:
        """Put stand-ins among the keys of a dict; whether it has any."""
        held = table.find()
        if table.kind != ITEM or not isinstance(held, dict):
            return False
        keys = {key: self.inside(key) for key in held}
        if all(a is b for a, b in keys.items()):
            return False
        for key, new in keys.items():
            if new is not key:
                self._keys[_known_as(new)] = key
                table.name_as(new, key)
        _rename(held, keys.__getitem__)
        return True

    def key(self, key: Any) -> Any:
        """The key in whose place a stand-in is; any other one unchanged."""
        return self._keys.get(_known_as(key), key)


def _known_as(key: Any) -> Any:
    return (Tensor, id(key)) if isinstance(key, Tensor) else key


def _rename(held: dict[Any, Any], new: Callable[[Any], Any]) -> None:
    items = [(new(key), value) for key, value in held.items()]
    held.clear()
    held.update(items)
