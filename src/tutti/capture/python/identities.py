"""Containers in which a step looks parameters up: `p in frozen`, `names[p]`, `id(p) in skipped`.

A trace puts fakes in place of the state's tensors. It puts them into these containers, too: among the keys of
a dict, into sets and tuples, and the fakes' ids in place of the tensors'. Keys and ids that the step adds are
those of the tensors outside of the trace.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """The tensors of the state, by id, and what stands in for each.

    Args:
        stand_ins: by id of a tensor.
        tensors: those of which a step may add keys.
    """

    def __init__(self, stand_ins: Mapping[int, Tensor], tensors: Iterable[Tensor] = ()) -> None:
        self._stand_ins = stand_ins
        self._ids = {old: id(new) for old, new in stand_ins.items()}
        self._old_ids = {new: old for old, new in self._ids.items()}
        # The ids among the values: they count as long as their tensors exist.
        self.asked: set[int] = set()
        # By id of a stand-in, the tensor.
        self._tensors = {self._ids[id(x)]: x for x in tensors if id(x) in self._ids}

    def inside(self, value: Any) -> Any:
        """The value with stand-ins for the tensors, and for their ids, that it is or holds."""
        return replaced_inside(value, self._stand_in)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if (new := self._stand_ins.get(id(value), value)) is not value:
                # Of two, a shard and the former whole one, that which Python holds.
                self._tensors[id(new)] = value
            return new
        if type(value) is int and value in self._ids:
            self.asked.add(value)
            self._old_ids[self._ids[value]] = value
            return self._ids[value]
        return value

    @contextlib.contextmanager
    def inside_of(self, tables: Sequence[Table]) -> Iterator[None]:
        """Inside, the values of `tables` have stand-ins; the end takes them out of keys alone."""
        dicts: list[dict[Any, Any]] = []
        try:
            for table in tables:
                held = table.find()
                if table.kind == ITEM and isinstance(held, dict):
                    dicts.append(held)
                    self._put_into_keys(table, held)
            for _, entry, value in list(named(tables)):
                if isinstance(value, set):
                    self._put_into_set(value)
                elif entry.table.writable and (new := self.inside(value)) is not value:
                    entry.put(new)
            yield
        finally:
            for held in dicts:
                _rename(held, {key: self.key(key) for key in held})

    def _put_into_set(self, found: set[Any]) -> None:
        items = [self.inside(x) for x in found]
        if any(a is not b for a, b in zip(items, found, strict=True)):
            found.clear()
            found.update(items)

    def _put_into_keys(self, table: Table, held: dict[Any, Any]) -> None:
        """Put stand-ins among the keys of a dict."""
        keys = {key: self.inside(key) for key in held}
        for key, new in keys.items():
            if new is not key:
                table.name_as(new, key)
        _rename(held, keys)

    def key(self, key: Any) -> Any:
        """The key in whose place a stand-in is; any other one unchanged."""
        return replaced_inside(key, self._outside)

    def _outside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        if type(value) is int and value in self._old_ids:
            self.asked.add(self._old_ids[value])
            return self._old_ids[value]
        return value

    def left(self, value: Any) -> Any:
        """A value that the step leaves, with the keys and the ids of tensors outside of the trace."""
        return _with_keys(value, self.key, self._old_id)

    def left_before(self, value: Any) -> Any:
        """A value that another trace has left, with the keys and the ids of this one."""
        return _with_keys(value, self.inside, self._stand_in_of_id)

    def _old_id(self, leaf: Any) -> Any:
        return self._outside(leaf) if type(leaf) is int else leaf

    def _stand_in_of_id(self, leaf: Any) -> Any:
        return self._stand_in(leaf) if type(leaf) is int else leaf


def _with_keys(value: Any, of_key: Callable[[Any], Any], of_leaf: Callable[[Any], Any]) -> Any:
    """The value with other leaves, and other keys in its dicts; itself if none changes."""
    if isinstance(value, dict):
        keys = [of_key(key) for key in value]
        items = [_with_keys(x, of_key, of_leaf) for x in value.values()]
        known = zip(value.items(), keys, items, strict=True)
        if all(key is a and x is b for (key, x), a, b in known):
            return value
        made = copy.copy(value)  # of its class, with its default
        made.clear()
        made.update(zip(keys, items, strict=True))
        return made
    if type(value) in (list, tuple):
        items = [_with_keys(x, of_key, of_leaf) for x in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return of_leaf(value)


def _rename(held: dict[Any, Any], keys: Mapping[Any, Any]) -> None:
    if any(new is not key for key, new in keys.items()):
        items = [(keys[key], value) for key, value in held.items()]
        held.clear()
        held.update(items)
