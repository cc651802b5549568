"""Contiguous pieces of work in stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Seconds of a stage without work, which a division has only if every division has one.
_NO_WORK = 1e30


def balanced(times: Sequence[float], sending: Sequence[float], count: int) -> list[int]:
    """The stage of each piece; no stage is empty, nor without work if that is possible.

    A stage takes the time of its pieces and that of its messages to the next one. The result is the best
    one: the slowest of k stages is computed from that of k - 1, for each last piece.

    Args:
        times: seconds of each piece, at least as many as stages.
        sending: seconds of the messages at the end of each piece but the last.
        count: number of stages.
    """
    number = len(times)
    before = np.concatenate([[0.0], np.cumsum(times)])
    ends = np.concatenate([sending, [0.0]])
    # By the first piece and the last one of a stage.
    work = before[1:] - before[:-1, None]
    alone = work + ends + _NO_WORK * (work <= 0)
    alone[np.tril_indices(number, -1)] = math.inf
    slowest, firsts = alone[0], list[np.ndarray]()
    for _ in range(1, count):  # `slowest`: by the last piece of the newest stage
        ways = np.maximum(slowest[:-1, None], alone[1:])
        firsts.append(ways.argmin(axis=0) + 1)
        slowest = ways.min(axis=0)
    stages, end = [0] * number, number - 1
    for stage in range(count - 1, 0, -1):
        first = int(firsts[stage - 1][end])
        stages[first : end + 1] = [stage] * (end + 1 - first)
        end = first - 1
    return stages
