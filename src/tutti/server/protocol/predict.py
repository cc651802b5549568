"""Predicts the weights at the time of their gradient's update: `async(predict)`.

    w'_t = w_t + (lag + 1) (w_t - w_{t-1})        lag: the mean staleness, measured

A gradient that is `lag` updates late then fits the weights that it updates. Late gradients destabilize an
optimizer with momentum at rates that are otherwise stable: in a valley of curvature h, steps of rate lr with
a first momentum of 0.9 are stable until lr h = 38 on time, until 0.5 two updates late, and until 1.2 two
updates late and predicted; with a first momentum of 0.9^(1/3) (three workers make three updates of a batch)
until 2.9. After SpecTrain (Chen et al., 1809.02839) and XPipe (Guan et al., 1911.04610), which extrapolate by
the optimizer's momentum; this module uses the last update, which works for any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tutti.server.protocol.update import WEIGHT

# The slot of a block's weight before its last update.
BEFORE = "weight before"
# The weight of one push in the mean, and the greatest staleness that counts, per worker: a worker after a
# suspension must not dominate the mean.
_SHARE, _MOST = 1 / 16, 4


def hold(slots: Mapping[str, Tensor]) -> None:
    """Keep a copy of a block's weight before its update."""
    slots[BEFORE].copy_(slots[WEIGHT])


def predicted(slots: Mapping[str, Tensor], lag: float, rows: Tensor | None = None) -> Tensor:
    """A block's weight, or some rows of it, `lag` + 1 updates ahead."""
    now, before = slots[WEIGHT], slots[BEFORE]
    if rows is not None:
        now, before = now[rows], before[rows]
    return (now - before).mul_(lag + 1).add_(now)


def smoothed(lag: float, staleness: int, num_workers: int) -> float:
    """The mean staleness after one more push."""
    return lag + _SHARE * (min(staleness, _MOST * num_workers) - lag)
