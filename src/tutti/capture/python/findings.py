"""The knowledge of a step's Python values from its calls and traces so far."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tutti.capture.python.appended import TraceAgain
from tutti.capture.python.contents import refused_change
from tutti.capture.python.drawn_numbers import Draw, DrawnNumber
from tutti.capture.python.held_values import (
    TableEntry,
)
from tutti.capture.python.read_places import Site
from tutti.errors import CaptureError


@dataclass(frozen=True)
class Number:
    """A number that is an input of the graph, and its entry; several entries for one count.

    Those are an optimizer's step counts of each parameter: one count as long as they are equal.
    """

    name: str
    entries: tuple[TableEntry, ...]

    @property
    def value(self) -> int | float:
        """Its current value."""
        value = self.entries[0].get()
        return float(value) if isinstance(value, float) else int(value)

    def put(self, value: Any) -> None:
        for entry in self.entries:
            entry.put(value)


# The places in a name that begin an item or an attribute of the value with the name before it.
_INSIDE = re.compile(r"[.\[]")


@dataclass
class Findings:
    """Knowledge of the numbers of one step from its calls so far, by name of an entry.

    Args:
        varying: numbers that have changed, and so are inputs.
        fixed: numbers that must be constants, since a trace reads their values.
        unread: values that the step leaves in modules, and no call reads: no trace depends on them.
        appended: lists to which the step appends, and which it does not read: no trace depends on them.
        used: other lists that the step makes longer or shorter, each with the line of a use but an append.
        held: by id, tensors whose ids the step's Python has: no other object may get these ids.
        ids: of the model's tensors, each with the tensor's number.
        loops: the lines of reads in loops.
        kinds: the classes of containers in batches, of which the step may call methods; in order.
        gradients: the questions of traces about gradients that earlier calls have left.
        draws: the random numbers that a trace has drawn from the host's generators.
        constant_draws: those whose values Python reads.
        has_expected: whether a walk has noted the numbers that may change.
    """

    varying: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    appended: set[str] = field(default_factory=set)
    used: dict[str, str] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)
    loops: set[Site] = field(default_factory=set)
    kinds: dict[type, None] = field(default_factory=dict)
    gradients: set[tuple[str, str]] = field(default_factory=set)
    draws: tuple[Draw, ...] = ()
    constant_draws: set[Draw] = field(default_factory=set)
    has_expected: bool = False

    def is_unread(self, name: str) -> bool:
        """Whether a value is one that no call reads, or in one."""
        unread, appended = self.unread, self.appended
        if not unread and not appended:
            return False
        outer = [name[: m.start()] for m in _INSIDE.finditer(name)]
        return name in unread or any(x in unread or x in appended for x in outer)

    def append_to(self, name: str) -> None:
        """Trace again with a list that notes what the step does with it; nothing for a list that it reads."""
        if name not in self.used and name not in self.appended:
            self.appended.add(name)
            raise TraceAgain

    def use(self, name: str, line: str) -> None:
        """Trace again without such a list: the step reads it, too, at this line."""
        self.used[name] = line
        self.appended.discard(name)
        raise TraceAgain

    def refused_length(self, name: str, before: int, after: int) -> CaptureError:
        """The error for a list that the step makes longer or shorter, with the line of a use.

        Raises `TraceAgain` if no trace has noted its uses.
        """
        self.append_to(name)
        return refused_change(name, before, after, at=self.used.get(name, ""))

    def expect_draws(self, found: Sequence[DrawnNumber]) -> bool:
        """Expect these draws in the next trace; whether they differ from those expected before."""
        before, self.draws = self.draws, tuple(one.draw for one in found)
        return self.draws != before

    def fix_draws(self, draws: Iterable[Draw]) -> bool:
        """Make constants of these inputs; whether there are any."""
        count = len(self.constant_draws)
        self.constant_draws |= {*draws}
        return len(self.constant_draws) > count

    def fix(self, inputs: Sequence[Number]) -> bool:
        """After a failed trace: make constants of the whole numbers among its inputs, or of all."""
        whole = {entry.name for n in inputs for entry in n.entries if isinstance(n.value, int)}
        self.fixed |= whole or {entry.name for n in inputs for entry in n.entries}
        return bool(inputs)
