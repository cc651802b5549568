"""Weights as they will be when the gradient that is made of them has been applied: `async(predict)`.

    w'_t = w_t + (lag + 1) (w_t - w_{t-1})        lag: the mean staleness, measured

A gradient that comes `lag` updates late is then about on time. Late ones make an optimizer with momentum
unstable where those on time do not: in a valley of curvature h, steps of rate lr with a first momentum of 0.9
are stable until lr h = 38 on time, until 0.5 two updates late, and until 1.2 two updates late and predicted;
with a first momentum of 0.9^(1/3) (three workers make three updates of a batch) until 2.9. After SpecTrain
(Chen et al., 1809.02839) and XPipe (Guan et al., 1911.04610), which extrapolate by the optimizer's momentum;
here it is the last update, so that any optimizer will do.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tutti.server.protocol.update import WEIGHT

# The slot of a block's weight before its last update.
BEFORE = "weight before"
# How much one push counts for the mean, and the most that it counts as, for each worker: one that was
# stopped for a while must not carry all others away.
_SHARE, _MOST = 1 / 16, 4


def hold(slots: Mapping[str, Tensor]) -> None:
    """Before a block's weight is updated: keep it as it is."""
    slots[BEFORE].copy_(slots[WEIGHT])


def predicted(slots: Mapping[str, Tensor], lag: float, rows: Tensor | None = None) -> Tensor:
    """A block's weight, or some rows of it, ahead by `lag` updates and one."""
    now, before = slots[WEIGHT], slots[BEFORE]
    if rows is not None:
        now, before = now[rows], before[rows]
    return (now - before).mul_(lag + 1).add_(now)


def smoothed(lag: float, staleness: int, num_workers: int) -> float:
    """The mean staleness after one more push."""
    return lag + _SHARE * (min(staleness, _MOST * num_workers) - lag)
