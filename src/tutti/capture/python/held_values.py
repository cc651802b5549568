"""The entries of Python values that a step reaches: tables of values by key, and their names.

kind     held by                         name of a value
item     a dict or a list                state['count']
member   the attributes of an object     trainer.beta
scope    the globals of a Python module  calls
slot     a class, or an object without a table of attributes
cell     a variable of a closure         beta
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor

ITEM, MEMBER, SCOPE, SLOT, CELL = "item", "member", "scope", "slot", "cell"
MISSING = object()  # in place of a missing value
MOVED = object()  # in place of a value that goes behind the others of its dict
END = object()  # the key of the place behind the last item of a list
WHOLE = object()  # the key of all items of a list
# The errors of a reader for a missing value.
GONE = (KeyError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True, eq=False)
class Table:
    """Values under keys.

    Args:
        prefix: the beginning of their names.
        find: returns their holder; for an optimizer's groups and slots, the current one.
        keys: the keys that count; None for all.
        ignored: keys that never count, even if a step adds them.
        ids: of tensors, each with the tensor's number, for keys that are ids.
        of_caller: whether the holder is an argument of the step, or in one: a checkpoint does not have it.
    """

    prefix: str
    kind: str
    find: Callable[[], Any]
    keys: list[Any] | None
    ignored: frozenset[str] = frozenset()
    ids: Mapping[int, int] = field(default_factory=dict)
    of_caller: bool = False

    def name(self, key: Any) -> str:
        """The name of a value in messages and checkpoints."""
        if self.kind == CELL or key is END or key is WHOLE:
            return self.prefix
        if self.kind != ITEM:
            return f"{self.prefix}{key}"
        return f"{self.prefix}[{self.text(key)}]"

    def text(self, key: Any) -> str:
        """A key in a name: the same on every rank, which has other tensors and ids."""
        if isinstance(key, Tensor):
            return self._of_tensor(key)
        if type(key) is int and key in self.ids:
            return f"id of tensor {self.ids[key]}"
        if type(key) is tuple:
            return f"({', '.join(map(self.text, key))})"
        return repr(key)

    @functools.cached_property
    def _numbers(self) -> dict[int, int]:
        """By id of a tensor among the keys, its number among them; a new one comes behind the others."""
        tensors = (key for key in self.find() if isinstance(key, Tensor))
        return {id(key): i for i, key in enumerate(tensors)}

    def _of_tensor(self, key: Tensor) -> str:
        """A text that is the same for all values of the tensor."""
        return f"tensor {self._numbers.setdefault(id(key), len(self._numbers))}"

    def name_as(self, new: Any, key: Any) -> None:
        """Let `new` have the name of `key`, in whose place it is for a while."""
        if isinstance(new, Tensor):
            self._numbers[id(new)] = self._numbers[id(key)]

    def values(self) -> dict[Any, Any]:
        """The values now, by key."""
        held = self.find()
        if self.kind == CELL:
            return {None: _contents(held)}
        if isinstance(held, dict):
            keys = held if self.keys is None else self.keys
            return {key: dict.get(held, key, MISSING) for key in keys}
        if self.kind == ITEM:
            return dict(enumerate(plain_sequence(held)))
        return {key: getattr(held, key, MISSING) for key in self.keys or ()}

    def put(self, key: Any, value: Any) -> None:
        """Set the value of `key`; `MISSING` deletes it. `END` and `WHOLE` of a list get several values."""
        held = self.find()
        if key is END:
            held.extend(value)
        elif key is WHOLE:
            put_items(held, value)
        elif value is MOVED:
            if key in held:
                move_to_end(held, key)
        elif self.kind == CELL:
            if value is MISSING:
                del held.cell_contents
            else:
                held.cell_contents = value
        elif isinstance(held, dict):
            if value is MISSING:
                held.pop(key, None)
            else:
                held[key] = value
        elif self.kind == ITEM:
            held[key] = value
        elif value is MISSING:
            with contextlib.suppress(AttributeError):
                delattr(held, key)
        elif isinstance(held, type) and isinstance(vars(held).get(key), staticmethod):
            setattr(held, key, staticmethod(value))
        else:
            setattr(held, key, value)

    @property
    def writable(self) -> bool:
        """Whether the table can be assigned to."""
        return not isinstance(self.find(), tuple)

    def reader(self, keys: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """A function that reads the values of `keys`; it raises one of `GONE` for a missing one."""
        held = self.find()
        if self.kind == CELL:
            return lambda: (held.cell_contents,)
        if self.kind == SLOT:
            return lambda: [getattr(held, key) for key in keys]
        if isinstance(held, dict) and type(held) not in (dict, OrderedDict):
            # Its `[key]` may make a new value, as Transformers' ACT2FN does, or add one, as a defaultdict.
            return lambda: [dict.get(held, key, MISSING) for key in keys]
        held = plain_sequence(held) if isinstance(held, tuple) else held
        several = (
            keys if len(keys) > 1 else [*keys, *keys]
        )  # for one key it would return the bare value
        return functools.partial(itemgetter(*several), held)

    def width(self, keys: Sequence[Any]) -> int:
        """The number of values that the reader of `keys` returns for each."""
        return len(self.reader(keys)()) if len(keys) == 1 else 1

    @property
    def sized(self) -> Any:
        """The container that a new value would enlarge; None where new values do not count."""
        return None if self.kind in (SCOPE, SLOT, CELL) else self.find()


def plain_sequence(held: Any) -> Any:
    """A list or tuple without the `len`, `[]` and iteration of a user's class; anything else as it is."""
    if type(held) in (tuple, list):
        return held
    if isinstance(held, tuple):
        return tuple(tuple.__iter__(held))
    return list(list.__iter__(held)) if isinstance(held, list) else held


def put_items(held: Any, items: Sequence[Any]) -> None:
    """Give a list or a deque other items."""
    if not isinstance(held, deque):
        held[:] = items
    elif [*map(id, held)] != [*map(id, items)]:
        held.clear()
        held.extend(items)


def move_to_end(held: dict[Any, Any], key: Any) -> None:
    """Put a key of a dict behind the others."""
    if isinstance(held, OrderedDict):
        held.move_to_end(key)
    else:
        dict.__setitem__(held, key, dict.pop(held, key))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@dataclass(frozen=True)
class TableEntry:
    """One value of a table."""

    table: Table
    key: Any

    @property
    def name(self) -> str:
        return self.table.name(self.key)

    def get(self) -> Any:
        held = self.table.find()
        if isinstance(held, dict):
            return dict.get(held, self.key, MISSING)
        if self.table.kind == ITEM:
            held = plain_sequence(held)
            if self.key is WHOLE:
                return list(held)
            return held[self.key] if self.key is not END and self.key < len(held) else MISSING
        return _contents(held) if self.table.kind == CELL else getattr(held, self.key, MISSING)

    def put(self, value: Any) -> None:
        self.table.put(self.key, value)


def distinct(tables: Sequence[Table]) -> list[Table]:
    """The tables, so that no two values have the same name.

    Two closures may have a variable `n` each, two objects be the `self` of a method, two Python modules have
    a global of one name: the second is `n (2)`, `self (2).count`, `other_module.scale`.
    """
    holders: dict[str, int] = {}
    containers: dict[str, int] = {}  # by prefix: their names grow with them
    used: dict[str, int] = {}  # by prefix, the last number given
    chosen: dict[tuple[int, str, str], Table] = {}
    found: list[Table] = []
    for table in tables:
        holder, keys = id(table.find()), [*table.values()]
        before = chosen.get((holder, table.kind, table.prefix))
        among = [dataclasses.replace(table, prefix=before.prefix)] if before is not None else []
        one = next(
            one
            for one in itertools.chain(among, _renamed(table, used))
            if (one.kind != ITEM or containers.get(one.prefix, holder) == holder)
            and all(holders.get(one.name(key), holder) == holder for key in keys)
        )
        chosen[holder, table.kind, table.prefix] = one
        if one.kind == ITEM:
            containers[one.prefix] = holder
        holders |= {one.name(key): holder for key in keys}
        found.append(one)
    return found


def _renamed(table: Table, used: dict[str, int]) -> Iterator[Table]:
    """The table as it is, and under other names."""
    yield table
    prefix = table.prefix
    if table.kind == SCOPE and "__name__" in table.find():
        prefix = f"{table.find()['__name__']}.{prefix}"
        yield dataclasses.replace(table, prefix=prefix)
    stem = prefix.removesuffix(".")
    while True:
        number = used[prefix] = used.get(prefix, 1) + 1
        yield dataclasses.replace(table, prefix=f"{stem} ({number}){prefix[len(stem) :]}")


def named(tables: Sequence[Table]) -> Iterator[tuple[str, TableEntry, Any]]:
    """Every value by its name, with its entry."""
    for table in tables:
        for key, value in table.values().items():
            yield table.name(key), TableEntry(table, key), value
