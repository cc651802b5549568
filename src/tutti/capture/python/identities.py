"""Containers in which a step looks parameters up: `p in frozen`, `names[p]`, `id(p) in skipped`.

A trace puts fakes in place of the state's tensors. It puts them into these containers, too: among the keys of
a dict, into sets and tuples, and the fakes' ids in place of the tensors'.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tutti.capture.python.held_values import ITEM, Table, named


def replaced_inside(value: Any, of: Callable[[Any], Any]) -> Any:
    """`of(value)`, or the value with `of(x)` for each x inside; the value itself if none of them changes.

    Inside means: in a tuple, a frozenset, a partial, a bound method or a weak reference.
    """
    if (new := of(value)) is not value:
        return new
    if type(value) is weakref.ref:
        held = value()
        return value if (new := of(held)) is held else weakref.ref(new)
    if isinstance(value, types.MethodType):
        holder = replaced_inside(value.__self__, of)
        return value if holder is value.__self__ else types.MethodType(value.__func__, holder)
    if type(value) is functools.partial:
        before = value.func, value.args, tuple(value.keywords.values())
        if (parts := replaced_inside(before, of)) is before:
            return value
        function, args, options = parts
        return functools.partial(function, *args, **dict(zip(value.keywords, options, strict=True)))
    if type(value) is frozenset or isinstance(value, tuple):
        items = [replaced_inside(x, of) for x in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[union-attr]
    return value


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
        """The value with stand-ins for the tensors, and for their ids, that it is or holds."""
        return replaced_inside(value, self._stand_in)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if type(value) is int and value in self._ids:
            self.asked.add(value)
            return self._ids[value]
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
