"""Guesses at the values that a trace reads, so that its loops end: `while True: ...; if error < 1: break`.

A guess that is always the same would never end it. So a trace that reads much at one line learns that this is
a loop, and another one begins: there the guess changes after some turns. The run then shows how many turns
there are. If it finds no end, the next trace guesses twice as many.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from tutti.capture.python.appended import TraceAgain
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_places import Place, Site
from tutti.errors import CaptureError
from tutti.user_lines import program_line, quoted

_TURNS = 4  # of a loop, with the same guess
_CHANGES = 1 / 8  # the chance that the guess changes after them
# A line with as many guessed reads is in a loop: many, or fewer with much work between them.
_MANY, _SOME, _MUCH_WORK = 256, 32, 6_000
_MOST_WORK = 20_000  # operations of a loop that finds no end


class EndlessLoop(CaptureError):
    """A loop without an end that a trace could find; another guess before it does not help."""


class LoopReads:
    """The guesses of one trace.

    Args:
        assumed: the values that are known.
        loops: the lines of reads in loops, as far as traces have found any; this trace may add one.
    """

    def __init__(self, assumed: Assumed, loops: set[Site]) -> None:
        self._assumed, self._loops = assumed, loops

    def begin(self, work: Callable[[], int]) -> None:
        """Begin a trace; `work()` is the number of its operations so far."""
        self._work = work
        self._coin = random.Random(0)  # noqa: S311  # every rank guesses alike
        self._known: dict[Site, int] = {}
        self._guessed: Counter[Site] = Counter()
        self._begun: dict[Site, int] = {}
        self._others: dict[type, float] = {}  # the guesses that may end a loop

    def value(self, place: Place, kind: type, *, decides: bool) -> float:
        """The value of a read, known or a guess; `decides`: branches have depended on its line.

        Raises:
            TraceAgain: once a line turns out to be in a loop.
            EndlessLoop: for a loop that finds no end.
        """
        site, number = place
        begun = self._begun.setdefault(site, self._work())
        value = self._assumed.values.get(place, math.nan)  # another way may read another kind
        if math.isfinite(value):
            return value
        usual = self._assumed.guess(kind)
        if not decides:
            return usual
        work = self._work() - begun
        if work >= _MOST_WORK:
            raise _endless(number, work)
        known = self._num_known(site)
        if known > 1 and number <= 2 * known and not self._assumed.generic:
            before, last = (self._assumed.values[site, k] for k in (known - 1, known))
            if math.isfinite(last) and (kind is not bool or last == before):
                return last
        self._guessed[site] += 1
        turns = self._guessed[site]
        if site in self._loops:
            return usual if turns <= _TURNS else self._other(kind, turns)
        if turns >= _MANY or (turns >= _SOME and work >= _MUCH_WORK):
            self._loops.update(s for s, n in self._guessed.items() if n >= _SOME)
            raise TraceAgain
        return usual

    def _num_known(self, site: Site) -> int:
        """How many of a line's reads are known, from the first one on."""
        if site not in self._known:
            number, values = 0, self._assumed.values
            while (site, number + 1) in values:
                number += 1
            self._known[site] = number
        return self._known[site]

    def _other(self, kind: type, turns: int) -> float:
        """A guess that may end the loop: by chance, so that lines of one loop differ.

        It is mostly the one before, since an end may need several reads alike.
        """
        if turns == _TURNS + 1 or self._coin.random() < _CHANGES:
            before = self._others.get(kind, self._assumed.guess(kind))
            self._others[kind] = (not before) if kind is bool else self._number()
        value = self._others[kind]
        return round(value) if kind is int else value

    def _number(self) -> float:
        """A number of any size; a positive one after an error in arithmetic."""
        size, sign = 10 ** self._coin.uniform(-9, 9), self._coin.random()
        if self._assumed.generic or sign < 0.6:
            return size
        return 0.0 if sign < 0.8 else -size


def _endless(number: int, work: int) -> EndlessLoop:
    return EndlessLoop(
        f"the step has a loop without an end that capture finds: it reads a value here {number} times",
        at=quoted(program_line()),
        why=f"capture writes every turn out, {work} operations so far, until the value ends the loop",
        fix="a bound on the number of turns (for _ in range(100): ... break); fewer turns; or the loop "
        "before the step, its result handed over as an argument",
    )
