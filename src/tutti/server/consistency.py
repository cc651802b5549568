"""How far workers may run apart: `step`, `bounded(s)` or `async`.

step         each clock makes one update from the sum of all workers' gradients; all wait for it
async        each push is an update of its own, as it comes; with `async(damped)` its learning rates are
             divided by max(1, tau), tau the updates since the pull (Zhang et al., 1511.05950)
bounded(s)   as async, but a worker at clock c waits until the slowest is at c - s: it has seen all updates
             up to clock c - s - 1 (stale synchronous parallel: Ho et al., NIPS 2013); bounded(0) is step

With `ahead`, `async` and `bounded` bring the next weights while a worker computes: a step older, and no wait
for the network. `traffic=bf16|int8`: gradients travel in so many bits, with error feedback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.comm.coding import NAMES
from tutti.errors import LayoutError

_WORDS = re.compile(r"\s*(step|async|bounded)\s*(?:\(([^()]*)\))?\s*")
_FLAGS = ("damped", "ahead")


@dataclass(frozen=True)
class Consistency:
    """`bound`: how many clocks a worker may be ahead of what it has seen; None: as many as it likes.

    `damped`, `ahead`, `traffic`: see above.
    """

    bound: int | None = 0
    damped: bool = False
    ahead: bool = False
    traffic: str = NAMES[0]

    @property
    def alone(self) -> bool:
        """Whether each push is an update of its own."""
        return self.bound != 0

    def permits(self, clock: int, floor: int) -> bool:
        """Whether a worker at `clock` may go on when all updates of the clocks before `floor` are made."""
        return self.bound is None or floor >= clock - self.bound

    def __str__(self) -> str:
        words = [str(self.bound)] if self.bound else []
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        words += [f"traffic={self.traffic}"] if self.traffic != NAMES[0] else []
        name = "async" if self.bound is None else "bounded" if self.bound else "step"
        return f"{name}({', '.join(words)})" if words else name


def parse(text: str) -> Consistency:
    """The consistency that `text` names.

    Raises:
        LayoutError: it names none.
    """
    match = _WORDS.fullmatch(text)
    if match is None:
        raise _refused(text)
    name, words = match[1], [w.strip() for w in (match[2] or "").split(",") if w.strip()]
    bound: int | None = None if name == "async" else 0
    if name == "bounded":
        if not words or not re.fullmatch(r"\d{1,9}", words[0]):
            raise _refused(text)
        bound = int(words.pop(0))
    traffic = next(
        (w.removeprefix("traffic=") for w in words if w.startswith("traffic=")), NAMES[0]
    )
    flags = [w for w in words if not w.startswith("traffic=")]
    known = _FLAGS if bound != 0 else ()
    if traffic not in NAMES or set(flags) - set(known) or len(set(words)) < len(words):
        raise _refused(text)
    return Consistency(bound, "damped" in flags, "ahead" in flags, traffic)


def _refused(text: str) -> LayoutError:
    return LayoutError(
        f"sync={text} is no consistency of servers",
        why="they know step, async and bounded(s); async and bounded with damped or ahead, all with "
        f"traffic={'|'.join(NAMES)}",
        fix="sync=step, sync=async or sync=bounded(2)",
    )
