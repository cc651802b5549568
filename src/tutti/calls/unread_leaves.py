"""Finds the plain values of a batch that the step does not read: no program depends on them.

call 1   {"x": x, "path": "a.png"}    a program for "a.png"
call 2   {"x": x, "path": "b.png"}    another trace, with an `UnreadValue` in its place: the same graph
call 3   {"x": x, "path": "c.png"}    the program of call 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.capture.unread import LeafRead, UnreadValue, is_unread, set_now, unread, unread_kind

_KINDS = frozenset({str, bytes, int, bool})
_MOST_FORMS = 64  # of batches
_MOST_READS = 3  # found one by one, before all values of a trial count as read


@dataclass(frozen=True)
class Trial:
    """A call with some of its leaves as `UnreadValue`, which alone differ from those of an earlier call.

    Args:
        leaves: of the call.
        at: the positions of those that are tried.
        before: the signature of the earlier call.
    """

    leaves: list[Any]
    at: frozenset[int]
    before: Any


class UnreadLeaves:
    """Those of one step, by the form of its batch and their positions in it."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[int, UnreadValue]] = {}
        self._read: dict[Any, set[int]] = {}
        self._num_reads: dict[Any, int] = {}

    def replaced(self, leaves: list[Any], form: Any) -> list[Any]:
        """The leaves of a call, each of these as an `UnreadValue` with the value of this call."""
        known = self._known.get(form) if self._known else None
        if not known:
            return leaves
        made = list(leaves)
        for at, one in known.items():
            if type(made[at]) is unread_kind(one):
                set_now(one, made[at])
                made[at] = one
        return made

    def trial(self, leaves: list[Any], form: Any, now: Any, known: Sequence[Any]) -> Trial | None:
        """A trial for a call without a program, with signature `now`; None if there is nothing to try.

        `known` are the signatures of calls with programs, the latest at the end.
        """
        read = self._read.get(form, frozenset())
        for before in reversed(known):
            if now[1:] != before[1:]:
                continue
            pairs = zip(now[0], before[0], strict=True)
            other = {at: b for at, (a, b) in enumerate(pairs) if a != b}
            if not other or other.keys() & read or not all(map(_is_plain, other.values())):
                continue
            if any(type(leaves[at]) is not b[0] for at, b in other.items()):
                continue
            made = list(leaves)
            for at, (_, value) in other.items():
                made[at] = unread(at, value, leaves[at])
            return Trial(made, frozenset(other), before)
        return None

    def keep(self, trial: Trial, form: Any) -> None:
        """Note that no code reads the leaves of a trial."""
        known = self._known.setdefault(form, {})
        known |= {at: trial.leaves[at] for at in trial.at}
        for kept in (self._known, self._read, self._num_reads):
            while len(kept) > _MOST_FORMS:
                del kept[next(iter(kept))]

    def read(self, leaves: Sequence[Any], error: BaseException | None, form: Any) -> None:
        """Note that a trace with these leaves has read some of them: that of a `LeafRead`, else all."""
        self._num_reads[form] = self._num_reads.get(form, 0) + 1
        at = {k for k, x in enumerate(leaves) if is_unread(x)}
        if isinstance(error, LeafRead) and self._num_reads[form] <= _MOST_READS:
            at = {error.at}
        self._read.setdefault(form, set()).update(at)
        known = self._known.get(form, {})
        for k in at:
            known.pop(k, None)


def _is_plain(key: Any) -> bool:
    """Whether a leaf's part of a signature is that of a plain value."""
    return type(key) is tuple and len(key) == 2 and key[0] in _KINDS
