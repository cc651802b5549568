"""Plain values of a batch that differ between calls: most are in no program.

unread     no code reads it (the name of a file): any value has the same program
free       an integer in formulas (a count of tokens): an input of the program
constant   the step reads it otherwise: a program for each value

call 1   {"x": x, "path": "a.png"}    a program for "a.png"
call 2   {"x": x, "path": "b.png"}    a trial, a trace with an `UnreadValue` in its place: the same graph
call 3   {"x": x, "path": "c.png"}    the program of call 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.capture.state.free_numbers import FreeInt
from tutti.capture.unread import (
    LeafRead,
    UnreadValue,
    is_incomparable,
    is_unread,
    set_now,
    stands_for_incomparable,
    unread,
    unread_kind,
)

_TENSOR_PARTS = 4  # of a tensor in a signature: its shape, dtype, device and sharding
_KINDS = frozenset({str, bytes, int, bool})
_MOST_FORMS = 64  # of batches
_MOST_READS = 3  # found one by one, before all values of a trial count as read
_MOST_WAYS = 4  # programs with free integers of one form, before these are constants


@dataclass(frozen=True)
class Trial:
    """A call with other leaves in place of some, which alone differ from those of an earlier call.

    Args:
        leaves: of the call.
        at: the positions of those that are tried.
        before: the signature of the earlier call; None if its tensors had other sizes.
        is_free: whether they are tried as free, else as unread.
    """

    leaves: list[Any]
    at: frozenset[int]
    before: Any
    is_free: bool


class ChangingLeaves:
    """Those of one step, by the form of its batch and their positions in it."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[int, UnreadValue | type[FreeInt]]] = {}
        self._read: dict[Any, set[int]] = {}  # by code
        self._constants: dict[Any, set[int]] = {}
        self._counts: dict[Any, list[int]] = {}  # of reads, and of programs with free integers
        self._incomparable: dict[Any, UnreadValue] = {}  # by form, position and kind

    def with_stand_ins(self, leaves: list[Any], form: Any) -> list[Any]:
        """The leaves of a call, with an `UnreadValue` in place of those that cannot be compared.

        One of its own for each kind of value: the programs that return it share it.
        """
        at = [k for k, x in enumerate(leaves) if is_incomparable(x)]
        if not at:
            return leaves
        made = list(leaves)
        for k in at:
            key = form, k, type(leaves[k])
            if key not in self._incomparable:
                self._incomparable[key] = unread(k, leaves[k], leaves[k])
            set_now(self._incomparable[key], leaves[k])
            made[k] = self._incomparable[key]
        return made

    def replaced(self, leaves: list[Any], form: Any) -> list[Any]:
        """The leaves of a call, with an `UnreadValue` or a `FreeInt` in place of those that are known."""
        known = self._known.get(form) if self._known else None
        if not known:
            return leaves
        made = list(leaves)
        for at, one in known.items():
            if isinstance(one, type):
                made[at] = FreeInt(made[at]) if type(made[at]) is int else made[at]
            elif type(made[at]) is unread_kind(one):
                set_now(one, made[at])
                made[at] = one
        return made

    def trial(
        self, leaves: list[Any], form: Any, now: Any, signatures: Sequence[Any]
    ) -> Trial | None:
        """A trial for a call without a program, with signature `now`; None if there is nothing to try.

        `signatures` are those of calls with programs, the latest at the end.
        """
        alike = [one for one in reversed(signatures) if now[1:] == one[1:]]
        made = (
            self._trial(leaves, form, now, one, sized) for sized in (True, False) for one in alike
        )
        return next(filter(None, made), None)

    def _trial(
        self, leaves: list[Any], form: Any, now: Any, before: Any, sized: bool
    ) -> Trial | None:
        """A trial after a call with the signature `before`; `sized`: if its tensors had the same sizes."""
        pairs = zip(now[0], before[0], strict=True)
        other = {at: b for at, (a, b) in enumerate(pairs) if a != b}
        if not sized:
            other = {at: b for at, b in other.items() if not _are_of_other_sizes(now[0][at], b)}
        constants = self._constants.get(form, frozenset())
        if not other or other.keys() & constants or not all(map(_is_plain, other.values())):
            return None
        if any(type(leaves[at]) is not b[0] for at, b in other.items()):
            return None
        read = other.keys() & self._read.get(form, frozenset())
        made = list(leaves)
        for k in read or other:
            # The values to compare with: of the earlier call, or of this one.
            value = other[k][1] if sized else leaves[k]
            made[k] = FreeInt(leaves[k]) if read else unread(k, value, leaves[k])
        return Trial(made, frozenset(read or other), before if sized or read else None, bool(read))

    def keep(self, trial: Trial, form: Any) -> None:
        """Note the success of a trial."""
        known = self._known.setdefault(form, {})
        known |= {at: FreeInt if trial.is_free else trial.leaves[at] for at in trial.at}
        self.note_program(trial.leaves, form)

    def note_program(self, leaves: Sequence[Any], form: Any) -> None:
        """Note another program, with free integers perhaps: those of many ways are constants."""
        free = [k for k, x in enumerate(leaves) if type(x) is FreeInt]
        if free and self._count(form, 1) > _MOST_WAYS:
            self._forget(free, form)
            self._constants.setdefault(form, set()).update(free)
        self._keep_few()

    def fail(self, leaves: Sequence[Any], error: BaseException | None, form: Any) -> None:
        """Note that these leaves are not as tried: `error` is that of the trace, if it has not ended."""
        at = [k for k, x in enumerate(leaves) if _is_tried(x)]
        if isinstance(error, LeafRead) and self._count(form, 0) <= _MOST_READS:
            at = [error.at]
        self._forget(at, form)
        read = {k for k in at if is_unread(leaves[k]) and unread_kind(leaves[k]) is int}
        self._read.setdefault(form, set()).update(read)
        self._constants.setdefault(form, set()).update({*at} - read)
        self._keep_few()

    def _keep_few(self) -> None:
        """Forget the forms that came first."""
        for kept in (self._known, self._read, self._constants, self._counts):
            while len(kept) > _MOST_FORMS:
                del kept[next(iter(kept))]

    def _count(self, form: Any, which: int) -> int:
        counts = self._counts.setdefault(form, [0, 0])
        counts[which] += 1
        return counts[which]

    def _forget(self, at: Iterable[int], form: Any) -> None:
        known = self._known.get(form, {})
        for k in at:
            known.pop(k, None)


def are_replaced(leaves: Sequence[Any]) -> bool:
    """Whether some leaves are not those of the batch."""
    return any(type(x) is FreeInt or is_unread(x) for x in leaves)


def are_tried(leaves: Sequence[Any]) -> bool:
    """Whether a trace of the leaves themselves may do where one of these fails."""
    return any(map(_is_tried, leaves))


def _is_tried(x: Any) -> bool:
    return type(x) is FreeInt or (is_unread(x) and not stands_for_incomparable(x))


def _are_of_other_sizes(a: Any, b: Any) -> bool:
    """Whether two parts of signatures are those of tensors that differ in sizes alone."""
    of_tensors = type(a) is type(b) is tuple and len(a) == len(b) == _TENSOR_PARTS
    return of_tensors and a[1:] == b[1:] and len(a[0]) == len(b[0])


def _is_plain(key: Any) -> bool:
    """Whether a leaf's part of a signature is that of a plain value."""
    return type(key) is tuple and len(key) == 2 and key[0] in _KINDS
