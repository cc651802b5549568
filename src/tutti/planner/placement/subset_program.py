"""The best subset of decisions as a mixed-integer linear program, solved exactly by HiGHS.

    minimize    sum of gains[i] x[i]  +  price * over
    such that   x[i] + x[j] <= 1                      for each pair that excludes each other
                used + sum of memory[i] x[i] - over <= bound
                x[i] in {0, 1},  over >= 0

`over` are the bytes beyond the memory; their price is above any gain, so they are as few as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def best_subset(
    gains: Sequence[float],
    memory: Sequence[float],
    excluded: Sequence[tuple[int, int]],
    *,
    used_nbytes: float = 0.0,
    bound_nbytes: float = math.inf,
) -> tuple[int, ...]:
    """The positions of the decisions to take.

    Args:
        gains: the seconds that each adds; negative ones save time.
        memory: the bytes that each adds.
        excluded: pairs of which at most one may be taken.
        used_nbytes: without any decision; bound_nbytes: of a device.
    """
    # Here, since the import takes longer than all searches of most runs, which have none.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_array

    num = len(gains)
    if not num:
        return ()
    scale = max((abs(g) for g in gains), default=0.0) or 1.0
    unit = max((abs(m) for m in memory), default=0.0) or 1.0
    cost = np.array([g / scale for g in gains] + [2.0 * num * 1e3])
    rows = lil_array((len(excluded) + 1, num + 1))
    for row, (i, j) in enumerate(excluded):
        rows[row, i] = rows[row, j] = 1.0
    for i, m in enumerate(memory):
        rows[len(excluded), i] = m / unit
    rows[len(excluded), num] = -1.0
    room = math.inf if math.isinf(bound_nbytes) else (bound_nbytes - used_nbytes) / unit
    upper: Any = np.array([1.0] * len(excluded) + [room])
    most: Any = np.array([1.0] * num + [np.inf])
    found = milp(
        cost,
        integrality=np.array([1] * num + [0]),
        bounds=Bounds(0.0, most),
        constraints=LinearConstraint(rows.tocsr(), -np.inf, upper),
    )
    assert found.x is not None, found.message  # no decision at all is a solution
    return tuple(i for i in range(num) if found.x[i] > 0.5)
