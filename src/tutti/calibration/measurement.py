"""Measures this machine: `tutti calibrate`.

One process for each device measures at the same time as the others, since ranks share memory and processors:
matmuls, a copy, an op that does nothing, a step's call, collectives of a few bytes and of many. The slowest
rank counts. It takes less than a minute.

Shared processors change their speed meanwhile. So each figure is the median of several rounds, relative to
the speed probe before and after it.

On processors the start of a collective is measured after kernels, as in a step: caches are cold, and ranks do
not arrive together. Back to back a collective takes a fifth of that.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.api import distribute
from tutti.calibration import crowded_start
from tutti.calibration.rank_measurement import (
    AXES,
    SMALL_NBYTES,
    RankMeasurement,
    found_by_ranks,
    wait_for,
    write_found,
)
from tutti.comm.collectives.transport import Distributed
from tutti.distributed_step import Step
from tutti.environment import PREDICTION
from tutti.planning.hardware_files import Measured

_MATMULS = {
    "cpu": ((1024, 1024, 1024), (2048, 1024, 1024), (512, 2048, 512)),
    "cuda": ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 4096)),
}
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_MEMORY_NBYTES = 1 << 28
_LARGE_NBYTES = 1 << 25
SECONDS = 2.0  # of one measurement, about
_TIMES = ("launch", "call", "start")  # the other figures are rates, or bytes


def measured(num_devices: int | None = None, seconds: float = SECONDS) -> Measured:
    """Start the processes, and return what they found.

    Args:
        num_devices: processes to start; by default one for each GPU, or for each processor.
        seconds: of each of a dozen measurements, about.

    Raises:
        PlanError: the processes failed.
    """
    count = num_devices or torch.cuda.device_count() or os.cpu_count() or 1
    ranks = found_by_ranks(count, __file__, seconds)
    crowded = 0.0 if torch.cuda.is_available() else crowded_start.measured(seconds)
    return _slowest(ranks, count, crowded)


def _slowest(ranks: list[dict[str, float]], count: int, crowded: float) -> Measured:
    def least(name: str) -> float:
        return min(rank[name] for rank in ranks)

    def most(name: str) -> float:
        return max(rank[name] for rank in ranks)

    peaks = {name: least(name) for name in _DTYPES if name in ranks[0]}
    return Measured(
        name=f"{_processor()}, {count} devices",
        num_devices=count,
        peaks=peaks,
        memory=least("memory"),
        bandwidth=least("bandwidth"),
        launch=most("launch"),
        call=most("call"),
        start=statistics.mean(rank["start"] for rank in ranks),
        rate=least("rate"),
        message=least("message"),
        probe=statistics.mean(rank["probe"] for rank in ranks),
        crowded=crowded,
    )


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def ring_rate(count: int, nbytes: int, small: float, large: float) -> float:
    """Bytes per second of each of `count` ranks in a ring.

    `small`, `large`: seconds of an all-reduce of a few bytes, and of `nbytes`.
    """
    return 2 * (count - 1) / count * nbytes / max(1e-9, large - small)


class _AllFigures(RankMeasurement):
    """Every figure of one process."""

    def found(self) -> dict[str, float]:
        """Every figure by name."""
        rounds = [self._round() for _ in range(self.num_rounds)]
        usual = self.usual
        figures = {"memory": self._memory(), "probe": usual if self.probe else 0.0}
        for name in rounds[0]:
            median = statistics.median(one[name] for one in rounds)
            figures[name] = median * usual if name in _TIMES else median / usual
        return figures

    def _round(self) -> dict[str, float]:
        figures = {name: self._matmul(dtype) for name, dtype in _DTYPES.items()}
        figures |= {"bandwidth": self._bandwidth(), "launch": self._launch(), "call": self._call()}
        return figures | self._collectives()

    def _median(self, call: Callable[[], object], share: float = 1.0, *, repeats: int = 0) -> float:
        """Median seconds of a call, in probes, while the other processes make it, too.

        Calls that exchange values are made `repeats` times a second of measurement, equally often on every
        rank.
        """
        repeats = max(3, int(repeats * self.seconds)) if repeats else 0
        self.meet()
        call()
        wait_for(self.device)
        times: list[float] = []
        least = 0.0 if repeats else share * self.seconds
        with self.speed() as speed:
            self.meet()
            while len(times) < repeats or (sum(times) < least and len(times) < 2000):
                begin = time.perf_counter()
                call()
                wait_for(self.device)
                times.append(time.perf_counter() - begin)
        self.meet()
        return statistics.median(times) / statistics.mean(speed)

    def _matmul(self, dtype: torch.dtype) -> float:
        """FLOP/s of the fastest of some matmuls."""
        best = 0.0
        for m, n, k in _MATMULS[self.device.type]:
            x, y = self.random((m, k), dtype), self.random((n, k), dtype)
            seconds = self._median(lambda x=x, y=y: torch.nn.functional.linear(x, y), 0.25)
            best = max(best, 2.0 * m * n * k / seconds)
        return best

    def _memory(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.count

    def _bandwidth(self) -> float:
        """Bytes read and written a second by a sum of values that no cache holds."""
        x, out = self._large
        return 2 * _MEMORY_NBYTES / self._median(lambda: torch.add(x, 1.0, out=out))

    @cached_property
    def _large(self) -> tuple[Tensor, Tensor]:
        x, out = (torch.ones(_MEMORY_NBYTES // 4, device=self.device) for _ in range(2))
        return x, out

    def _launch(self) -> float:
        """Seconds of an op on a few values."""
        x = self.random((4,))

        def several() -> None:
            for _ in range(100):
                torch.add(x, 1.0)

        return self._median(several, 0.25) / 100

    def _call(self) -> float:
        """Seconds of a call of the smallest step, beside its ops."""
        step, call = self._smallest_step
        ops = len([n for n in step.graph.nodes if n.op == "call_function"]) * 1e-6
        return max(0.0, self._median(call, repeats=300) - ops / self.usual)

    @cached_property
    def _smallest_step(self) -> tuple[Step, Callable[[], object]]:
        os.environ[PREDICTION.name] = "0"  # of no interest here
        model = torch.nn.Linear(2, 2, bias=False).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            loss = model(x).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        step = (
            distribute(train_step, model, optimizer, "", seed=0)
            if self.count == 1
            else (distribute(train_step, model, optimizer, f"data={self.count}"))
        )
        x = self.random((2 * self.count, 2))
        torch.distributed.broadcast(x, 0) if self.count > 1 else None
        for _ in range(3):
            step(x)
        return step, lambda: step(x)

    def _collectives(self) -> dict[str, float]:
        """Start and rate of all-reduces, rate of messages; of one device the rate of its memory."""
        if self.count == 1:
            rate = self._bandwidth()
            return {"start": 0.0, "rate": rate, "message": rate}
        small, large = self._all_reduce(SMALL_NBYTES), self._all_reduce(_LARGE_NBYTES)
        rate = ring_rate(self.count, _LARGE_NBYTES, small, large)
        start = small if self.device.type == "cuda" else max(small, self._start_in_step())
        return {"start": start, "rate": rate, "message": min(rate, self._message())}

    def _start_in_step(self) -> float:
        """Probes, in the mean, of an all-reduce of a few bytes after kernels of about a millisecond."""
        kernels, reduce = self.kernels(), self.small_reduce()
        times: list[float] = []
        with self.speed() as speed:
            self.meet()
            for _ in range(max(10, int(300 * self.seconds))):
                kernels()
                begin = time.perf_counter()
                reduce()
                times.append(time.perf_counter() - begin)
        self.meet()
        # Without the longest ones, in which other processes had the processor.
        usual = sorted(times)[: len(times) - len(times) // 20]
        return statistics.mean(usual) / statistics.mean(speed)

    def _all_reduce(self, nbytes: int) -> float:
        repeats, shared = 300 if nbytes < 1e6 else 30, self.groups.shared(AXES)
        if shared is None:
            x, group = self.random((nbytes // 4,)), Distributed(self.groups[AXES])
            return self._median(lambda: group.all_reduce(x, "max"), repeats=repeats)
        lying = shared.empty((nbytes // 4,), torch.float32)
        lying.fill_(1.0)
        return self._median(lambda: shared.all_reduce_([lying], "max"), repeats=repeats)

    def _message(self) -> float:
        """Bytes a second of a copy between two processes: written by one, read by the other."""
        if self.device.type == "cuda":
            return math.inf
        x = self.random((_LARGE_NBYTES // 4,))
        return _LARGE_NBYTES / (2 * self._median(lambda: x.clone(), 0.5))


if __name__ == "__main__":
    write_found(sys.argv[1], _AllFigures(float(sys.argv[2])).found())
