"""How far workers may run apart: `step`, `bounded(s)` or `async`.

step         each clock makes one update from the sum of all workers' gradients; all wait for it
async        each push is an update of its own, as it comes; with `async(damped)` its learning rates are
             divided by max(1, tau), tau the updates since the pull (Zhang et al., 1511.05950)
bounded(s)   as async, but a worker at clock c waits until the slowest is at c - s: it has seen all updates
             up to clock c - s - 1 (stale synchronous parallel: Ho et al., NIPS 2013); bounded(0) is step
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.errors import LayoutError

_BOUNDED = re.compile(r"bounded\(\s*(\d{1,9})\s*\)")


@dataclass(frozen=True)
class Consistency:
    """`bound`: how many clocks a worker may be ahead of what it has seen; None: as many as it likes."""

    bound: int | None = 0
    damped: bool = False

    @property
    def alone(self) -> bool:
        """Whether each push is an update of its own."""
        return self.bound != 0

    def permits(self, clock: int, floor: int) -> bool:
        """Whether a worker at `clock` may go on when all updates of the clocks before `floor` are made."""
        return self.bound is None or floor >= clock - self.bound

    def __str__(self) -> str:
        if self.bound is None:
            return "async(damped)" if self.damped else "async"
        return f"bounded({self.bound})" if self.bound else "step"


def parse(text: str) -> Consistency:
    """The consistency that `text` names.

    Raises:
        LayoutError: it names none.
    """
    plain = {"step": Consistency(), "async": Consistency(None)}
    plain["async(damped)"] = Consistency(None, damped=True)
    if text.strip() in plain:
        return plain[text.strip()]
    if match := _BOUNDED.fullmatch(text.strip()):
        return Consistency(int(match[1]))
    raise LayoutError(
        f"sync={text} is no consistency of servers",
        why="they know step, async, async(damped) and bounded(s)",
        fix="sync=step, sync=async or sync=bounded(2)",
    )
