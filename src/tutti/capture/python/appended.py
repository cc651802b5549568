"""Lists and deques that a step makes longer: `losses.append(loss.item())`.

The first trace finds a longer list. Another trace has one in its place that notes its uses: if the step
appends to it and does nothing else, what it appends is a result of the graph, and tutti appends it after each
call. The step's Python runs once, so a list with other uses is refused (`len(losses)`, `losses[0]`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tutti.capture.python.held_values import ITEM, Table, named
from tutti.user_lines import program_line


class TraceAgain(Exception):  # no error: a trace has learned something about the step
    """Ends a trace: the next one stands on better findings."""


class Appended:
    """Notes what a step appends to a list or a deque, and whether the step does anything else with it."""

    added: list[Any]
    last_append = ""  # the user's line
    other_use: str | None = None  # the user's line of the first one

    def note_use(self) -> None:
        """Note that the step does something else with it."""
        if self.other_use is None:
            self.other_use = program_line()

    def append(self, value: Any, /) -> None:
        """Append and note."""
        self.extend([value])

    def extend(self, values: Iterable[Any], /) -> None:
        """Extend and note."""
        values = list(values)
        self.last_append = program_line()
        self.added += values
        super().extend(values)  # type: ignore[misc]

    def __iadd__(self, values: Iterable[Any]) -> Appended:
        self.extend(values)
        return self

    def __getitem__(self, at: Any, /) -> Any:
        """An item; one that this call has appended, counted from the end, may be read."""
        if not (isinstance(at, int) and -len(self.added) <= at < 0):
            self.note_use()
        return super().__getitem__(at)  # type: ignore[misc]


class AppendedList(Appended, list[Any]):
    """A list that notes its uses."""


class AppendedDeque(Appended, deque[Any]):
    """A deque that notes its uses."""


_KINDS: dict[type, Any] = {list: AppendedList, deque: AppendedDeque}


def _noted(kind: type, name: str) -> Callable[..., Any]:
    former = getattr(kind, name)

    def method(self: Appended, *args: Any, **named: Any) -> Any:
        self.note_use()
        return former(self, *args, **named)

    return method


_OTHERS = (
    *("appendleft", "clear", "copy", "count", "extendleft", "index", "insert", "pop", "popleft"),
    *("remove", "reverse", "rotate", "sort", "__len__", "__iter__", "__reversed__", "__bool__"),
    *("__setitem__", "__delitem__", "__contains__", "__add__", "__mul__"),
    *("__rmul__", "__imul__", "__copy__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)
for _kind, _made in _KINDS.items():
    for _name in _OTHERS:
        if hasattr(_kind, _name):
            setattr(_made, _name, _noted(_kind, _name))


def _appended(held: Any) -> Any:
    """A list or a deque of the same items, which notes its uses."""
    options = {"maxlen": held.maxlen} if isinstance(held, deque) else {}
    made = _KINDS[type(held)](held, **options)
    made.added, made.other_use = [], None
    return made


def is_longer(table: Table, before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether a list or a deque has the items of before, and more behind them."""
    if table.kind != ITEM or type(table.find()) not in _KINDS or len(now) <= len(before):
        return False
    return all(x is y for x, y in zip(before, now, strict=False))


def put_in_place(tables: Sequence[Table], names: set[str]) -> list[tuple[Table, Appended]]:
    """Put what notes its uses in the place of each list or deque with one of these names."""
    chosen = [
        t for t in tables if t.prefix in names and t.kind == ITEM and type(t.find()) in _KINDS
    ]
    found = [(table, _appended(table.find())) for table in chosen]
    new = {id(table.find()): appended for table, appended in found}
    for _, entry, value in list(named(tables)):
        if type(value) in _KINDS and id(value) in new and entry.table.writable:
            entry.put(new[id(value)])
    return found
