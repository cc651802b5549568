"""The start of a collective where ranks take turns on a processor: there are more of them than processors.

Such a rank gives up the processor while it waits, and has it again some time after the others have come. So
an exchange takes longer than the kernels of all ranks that share a processor, one after the other.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from tutti.calibration.rank_measurement import RankMeasurement, found_by_ranks, write_found

_NAME = "crowded"
# A larger machine has processors for all ranks of a run, but not memory for twice as many.
_MOST_RANKS = 32


def measured(seconds: float) -> float:
    """Seconds for each of the ranks that share a processor, with two ranks on each; 0 if they are too many.

    Raises:
        PlanError: the processes failed.
    """
    num_ranks = 2 * (os.cpu_count() or 1)
    if num_ranks > _MOST_RANKS:
        return 0.0
    ranks = found_by_ranks(num_ranks, __file__, seconds)
    return statistics.mean(rank[_NAME] for rank in ranks)


class _TakingTurns(RankMeasurement):
    """A rank whose probe has the processor's clock: the time of others does not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, time.thread_time)

    def found(self) -> dict[str, float]:
        rounds = [self._round() for _ in range(self.num_rounds)]
        return {_NAME: max(0.0, statistics.median(rounds) * self.usual)}

    def _round(self) -> float:
        """Probes of a turn, beside the kernels of the ranks that share the processor, for each of them."""
        share = max(1.0, self.count / (os.cpu_count() or 1))
        kernels, reduce = self.kernels(), self.small_reduce()
        repeats, own = max(10, int(100 * self.seconds)), 0.0
        with self.speed() as speed:
            self.meet()
            reduce()
            begin = time.perf_counter()
            for _ in range(repeats):
                before = time.thread_time()
                kernels()
                own += time.thread_time() - before
                reduce()
            whole = time.perf_counter() - begin
        self.meet()
        return (whole / share - own) / repeats / statistics.mean(speed)


if __name__ == "__main__":
    write_found(sys.argv[1], _TakingTurns(float(sys.argv[2])).found())
