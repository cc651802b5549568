"""Contiguous pieces of work in stages, so that a micro-batch takes as few seconds as possible.

A micro-batch takes a pipeline rank at least as long as its stage. A stage also waits for what follows: of S
stages, stage s has S - s micro-batches under way, and each comes back after all later stages and messages:

    seconds of a micro-batch = max over s of  stage s,  (stages s .. S-1 + messages there and back) / (S - s)

So a message delays each micro-batch by about its time there and back, shared by the stages before it.

Where one stage is the longest anyway, such as one with the logits, many divisions of the others take as long.
Among these few seconds of messages are best, for which the first micro-batch of a step waits; then even
stages: an uneven one holds more weights and activations than need be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CLOSE = 1e-6  # the relative distance from the best division at which the search ends
# The share of the seconds that stages as uneven as one with all work beside an empty one are worth.
_UNEVEN = 3e-3
# The share of the seconds of all messages that a micro-batch is worth: the first of about 16 waits for them.
_FIRST = 1 / 16
# Divisions slower by this are looked at for even stages, too.
_SLOWER = 1e-3


def micro_batch_seconds(stages: Sequence[float], moving: Sequence[float]) -> float:
    """The seconds of a micro-batch.

    Args:
        stages: seconds of each stage, forward and backward.
        moving: seconds of the messages between each stage and the next, there and back.
    """
    following, found = 0.0, max(stages)
    for num, seconds in enumerate(reversed(stages), 1):
        following += seconds + (moving[-num + 1] if num > 1 else 0.0)
        found = max(found, following / num)
    return found


def division_cost(stages: Sequence[float], moving: Sequence[float]) -> float:
    """The seconds of a micro-batch, and a little more for messages and uneven stages; arguments as above."""
    total = sum(stages)
    squares = len(stages) * sum(x * x for x in stages) / total**2 if total else 1.0
    seconds = micro_batch_seconds(stages, moving)
    return seconds * (1 + _UNEVEN * (squares - 1)) + _FIRST * sum(moving)


def balanced(times: Sequence[float], moving: Sequence[float], count: int) -> list[int]:
    """The stage of each piece; no stage is empty, nor without work if that is possible.

    The seconds of a micro-batch are least, but for a thousandth where that saves messages or makes stages
    more even.

    Args:
        times: seconds of each piece, at least as many as stages.
        moving: seconds of the messages at the end of each piece but the last, there and back.
        count: number of stages.
    """
    for works in (True, False):
        division = _Division(times, moving, count, works=works)
        if (found := division.best()) is not None:
            return found
    raise AssertionError("fewer pieces than stages")


class _Division:
    """Pieces in `count` stages; with `works` no stage is without work."""

    def __init__(
        self, times: Sequence[float], moving: Sequence[float], count: int, *, works: bool
    ) -> None:
        self.count, self.works = count, works
        self.number = len(times)
        self.before = np.concatenate([[0.0], np.cumsum(times)])
        self.moving = np.concatenate([[0.0], moving])  # by the first piece behind the message

    def best(self) -> list[int] | None:
        """The best stages; None if there are none."""
        total = float(self.before[-1])
        most = total + float(self.moving.sum())
        low = high = total / self.count
        while (found := self.within(high)) is None:
            if high > most:
                return None
            low, high = high, high * 1.1 + 1e-30
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            if (tried := self.within(middle)) is None:
                low = middle
            else:
                found, high = tried, middle
        even = (self.within(high * slower, even=True) for slower in (1.0, 1.0 + _SLOWER))
        return min((found, *filter(None, even)), key=self._cost)

    def _cost(self, stage_of: Sequence[int]) -> float:
        firsts = np.flatnonzero(np.diff(stage_of, prepend=-1))
        stages = np.diff(self.before[[*firsts, self.number]])
        return division_cost(stages.tolist(), self.moving[firsts[1:]].tolist())

    def within(self, limit: float, *, even: bool = False) -> list[int] | None:
        """Stages with the fewest seconds of messages such that a micro-batch takes at most `limit`; with
        `even` those with the least `division_cost`.

        From the last stage to the first, if a piece begins the stage at hand: `least` is what counts of it
        and of later stages, and `sent` are the seconds of messages behind it. With `even` fewer messages
        could allow stages that these do not.
        """
        number, before = self.number, self.before
        rest = before[-1] - before[:-1]
        slack = limit * (1 + 1e-12)
        sent = np.where((rest <= slack) & self._has_work(rest), 0.0, np.inf)
        # What the square of a stage's seconds adds to the cost.
        scale = limit * _UNEVEN * self.count / max(float(before[-1]) ** 2, 1e-300)
        least = sent + scale * rest**2 if even else sent
        last = np.searchsorted(before, before[:-1] + slack, side="right") - 1
        width = int(np.max(last - np.arange(number)))
        if width < 1:
            return None
        # By the first piece of a stage: the first pieces of the next one, and what to add.
        following = np.arange(number)[:, None] + np.arange(1, width + 1)
        fits = (following <= last[:, None]) & (following < number)
        following = np.minimum(following, number - 1)
        seconds = before[following] - before[:-1, None]
        fits &= self._has_work(seconds)
        moving = self.moving[following]
        added = scale * seconds**2 + _FIRST * moving if even else moving
        chosen: list[np.ndarray] = []
        for num in range(2, self.count + 1):
            ways = np.where(fits, least[following] + added, np.inf)
            nexts = following[np.arange(number), ways.argmin(axis=1)]
            sent = (sent + self.moving)[nexts]
            least = np.where(rest + sent > num * slack, np.inf, ways.min(axis=1))
            chosen.append(nexts)
        if not np.isfinite(least[0]):
            return None
        firsts = [0]
        for nexts in reversed(chosen):
            firsts.append(int(nexts[firsts[-1]]))
        ends = [*firsts[1:], number]
        return [s for s, (a, b) in enumerate(zip(firsts, ends, strict=True)) for _ in range(a, b)]

    def _has_work(self, seconds: np.ndarray) -> np.ndarray:
        return seconds > 0 if self.works else seconds >= 0
