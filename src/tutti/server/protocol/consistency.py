"""The staleness bound of workers: `step`, `bounded(s)` or `async`.

step         each clock makes one update from the sum of all workers' gradients; all wait for it
async        each push is one update, at its arrival; `async(damped)` divides its learning rates by
             max(1, tau), tau the updates since the pull (Zhang et al., 1511.05950)
bounded(s)   as async, but a worker at clock c waits until the slowest is at c - s: it has seen all updates
             up to clock c - s - 1 (stale synchronous parallel: Ho et al., NIPS 2013); bounded(0) is step

With `predict`, `async` and `bounded` give workers a prediction of the weights at the time of their gradients'
update (`predict.py`). With `after=N` they begin with N clocks under `step`, while weights still change fast.
With `ahead` they prefetch the next weights while a worker computes: one step older, without a wait for the
network. `traffic=bf16|int8`: gradients travel in this format, with error feedback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.comm.collectives.compression import NAMES
from tutti.errors import LayoutError

_WORDS = re.compile(r"\s*(step|async|bounded)\s*(?:\(([^()]*)\))?\s*")
_FLAGS = ("damped", "predict", "ahead")


@dataclass(frozen=True)
class Consistency:
    """`bound`: how many clocks of updates a worker may lack; None: any number.

    `after`: number of first clocks under `step`; 0 if all are.  `damped`, `predict`, `ahead`, `traffic`:
    see above.
    """

    bound: int | None = 0
    after: int = 0
    damped: bool = False
    predict: bool = False
    ahead: bool = False
    traffic: str = NAMES[0]

    @property
    def apart(self) -> bool:
        """Whether any push is a separate update: false under `step`."""
        return self.bound != 0

    @property
    def both(self) -> bool:
        """Whether workers update together first, and apart later."""
        return self.apart and self.after > 0

    def alone(self, clock: int) -> bool:
        """Whether a push of this clock is a separate update."""
        return self.apart and clock >= self.after

    def permits(self, clock: int, floor: int) -> bool:
        """Whether a worker at `clock` may continue after all updates of the clocks before `floor`."""
        if floor < self.after:  # workers make these updates together
            return floor >= clock
        return self.bound is None or floor >= clock - self.bound

    def __str__(self) -> str:
        words = [str(self.bound)] if self.bound else []
        words += [f"after={self.after}"] if self.after else []
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        words += [f"traffic={self.traffic}"] if self.traffic != NAMES[0] else []
        name = "async" if self.bound is None else "bounded" if self.bound else "step"
        return f"{name}({', '.join(words)})" if words else name


def parse(text: str) -> Consistency:
    """Parse a consistency.

    Raises:
        LayoutError: `text` names none.
    """
    match = _WORDS.fullmatch(text)
    if match is None:
        raise _refused(text)
    name, words = match[1], [w.strip() for w in (match[2] or "").split(",") if w.strip()]
    bound: int | None = None if name == "async" else 0
    if name == "bounded":
        bound = _count(words.pop(0) if words else "", text)
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    known = ("traffic", "after", *_FLAGS) if bound != 0 else ("traffic",)
    flags = {flag: flag in options for flag in _FLAGS}
    traffic, after = options.get("traffic", NAMES[0]), _count(options.get("after", "0"), text)
    once = len(options) == len(words) and not any(options.get(flag) for flag in _FLAGS)
    if not once or options.keys() - set(known) or traffic not in NAMES:
        raise _refused(text)
    return Consistency(bound, after, **flags, traffic=traffic)


def _count(word: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", word):
        raise _refused(text)
    return int(word)


def _refused(text: str) -> LayoutError:
    return LayoutError(
        f"sync={text} is no consistency of servers",
        why="they know step, async and bounded(s); async and bounded with after=N (so many steps under step "
        f"first), damped, predict or ahead, all with traffic={'|'.join(NAMES)}",
        fix="sync=step, sync=async(after=300) or sync=bounded(2)",
    )
