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

import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.api import distribute
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.transport import Distributed
from tutti.distributed_step import Step
from tutti.environment import PREDICTION
from tutti.errors import PlanError
from tutti.launch.launch import launch
from tutti.launch.ranks import choose_gpu, ensure_process_group
from tutti.planning.hardware_files import Measured
from tutti.planning.speed_probe import SpeedProbe

AXES = ("data",)
_MATMULS = {
    "cpu": ((1024, 1024, 1024), (2048, 1024, 1024), (512, 2048, 512)),
    "cuda": ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 4096)),
}
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_MEMORY_NBYTES = 1 << 28
_LARGE_NBYTES, _SMALL_NBYTES = 1 << 25, 64
SECONDS = 2.0  # of one measurement, about
_MOST_ROUNDS, _ROUND_SECONDS = 5, 0.1
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
    with tempfile.TemporaryDirectory() as found:
        code = launch(count, __file__, [found, str(seconds)], f"data={count}" if count > 1 else "")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(found).glob("*.json"))]
    if code or len(ranks) != count:
        raise PlanError("the calibration failed", why=f"its processes ended with {code}")
    return _slowest(ranks, count)


def _slowest(ranks: list[dict[str, float]], count: int) -> Measured:
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
    )


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rank_device() -> torch.device:
    """This rank's GPU, its own from now on, or its processor."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    choose_gpu()
    return torch.device("cuda", torch.cuda.current_device())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def ring_rate(count: int, nbytes: int, small: float, large: float) -> float:
    """Bytes per second of each of `count` ranks in a ring.

    `small`, `large`: seconds of an all-reduce of a few bytes, and of `nbytes`.
    """
    return 2 * (count - 1) / count * nbytes / max(1e-9, large - small)


class _RankMeasurement:
    """What one process measures, in step with the others.

    Seconds and rates are relative to the speed probe until all of them are `found`; on a GPU they are plain.
    """

    def __init__(self, seconds: float) -> None:
        self.num_rounds = min(_MOST_ROUNDS, max(1, int(seconds / _ROUND_SECONDS)))
        self.seconds = seconds / self.num_rounds
        ensure_process_group()
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = rank_device()
        self.groups = Groups({"data": self.count}, [AXES] if self.count > 1 else [])
        self.probe = SpeedProbe(time.perf_counter) if self.device.type == "cpu" else None
        self.probes: list[float] = []

    def found(self) -> dict[str, float]:
        """Every figure by name."""
        rounds = [self._round() for _ in range(self.num_rounds)]
        usual = statistics.median(self.probes) if self.probes else 1.0
        figures = {"memory": self._memory(), "probe": usual if self.probe else 0.0}
        for name in rounds[0]:
            median = statistics.median(one[name] for one in rounds)
            figures[name] = median * usual if name in _TIMES else median / usual
        return figures

    def _round(self) -> dict[str, float]:
        figures = {name: self._matmul(dtype) for name, dtype in _DTYPES.items()}
        figures |= {"bandwidth": self._bandwidth(), "launch": self._launch(), "call": self._call()}
        return figures | self._collectives()

    @contextmanager
    def _speed(self) -> Iterator[list[float]]:
        """Context whose list holds, afterwards, the seconds of the probe before and after it."""
        found = [1.0]
        if self.probe is not None:
            found[:] = [self.probe()]
        yield found
        if self.probe is not None:
            found.append(self.probe())
            self.probes += found

    def _meet(self) -> None:
        if self.count > 1:
            torch.distributed.barrier()

    def _median(self, call: Callable[[], object], share: float = 1.0, *, repeats: int = 0) -> float:
        """Median seconds of a call, in probes, while the other processes make it, too.

        Calls that exchange values are made `repeats` times a second of measurement, equally often on every
        rank.
        """
        repeats = max(3, int(repeats * self.seconds)) if repeats else 0
        self._meet()
        call()
        wait_for(self.device)
        times: list[float] = []
        least = 0.0 if repeats else share * self.seconds
        with self._speed() as speed:
            self._meet()
            while len(times) < repeats or (sum(times) < least and len(times) < 2000):
                begin = time.perf_counter()
                call()
                wait_for(self.device)
                times.append(time.perf_counter() - begin)
        self._meet()
        return statistics.median(times) / statistics.mean(speed)

    def _matmul(self, dtype: torch.dtype) -> float:
        """FLOP/s of the fastest of some matmuls."""
        best = 0.0
        for m, n, k in _MATMULS[self.device.type]:
            x, y = self._random((m, k), dtype), self._random((n, k), dtype)
            seconds = self._median(lambda x=x, y=y: torch.nn.functional.linear(x, y), 0.25)
            best = max(best, 2.0 * m * n * k / seconds)
        return best

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

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
        x = self._random((4,))

        def several() -> None:
            for _ in range(100):
                torch.add(x, 1.0)

        return self._median(several, 0.25) / 100

    def _call(self) -> float:
        """Seconds of a call of the smallest step, beside its ops."""
        step, call = self._smallest_step
        ops = len([n for n in step.graph.nodes if n.op == "call_function"]) * 1e-6
        usual = statistics.median(self.probes) if self.probes else 1.0
        return max(0.0, self._median(call, repeats=300) - ops / usual)

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
        x = self._random((2 * self.count, 2))
        torch.distributed.broadcast(x, 0) if self.count > 1 else None
        for _ in range(3):
            step(x)
        return step, lambda: step(x)

    def _collectives(self) -> dict[str, float]:
        """Start and rate of all-reduces, rate of messages; of one device the rate of its memory."""
        if self.count == 1:
            rate = self._bandwidth()
            return {"start": 0.0, "rate": rate, "message": rate}
        small, large = self._all_reduce(_SMALL_NBYTES), self._all_reduce(_LARGE_NBYTES)
        rate = ring_rate(self.count, _LARGE_NBYTES, small, large)
        start = small if self.device.type == "cuda" else max(small, self._start_in_step())
        return {"start": start, "rate": rate, "message": min(rate, self._message())}

    def _start_in_step(self) -> float:
        """Probes, in the mean, of an all-reduce of a few bytes after kernels of about a millisecond."""
        shared = self.groups.shared(AXES)
        reduce = Distributed(self.groups[AXES]).all_reduce if shared is None else shared.all_reduce
        few = self._random((_SMALL_NBYTES // 4,))
        x, weight = self._random((128, 512)), self._random((512, 512))
        large, out = self._random((1 << 20,)), self._random((1 << 20,))

        def kernels() -> None:
            torch.nn.functional.linear(x, weight)
            torch.add(large, 1.0, out=out)

        times: list[float] = []
        with self._speed() as speed:
            self._meet()
            for _ in range(max(10, int(300 * self.seconds))):
                kernels()
                begin = time.perf_counter()
                reduce(few, "max")
                times.append(time.perf_counter() - begin)
        self._meet()
        # Without the longest ones, in which other processes had the processor.
        return statistics.mean(sorted(times)[: len(times) - len(times) // 20]) / statistics.mean(
            speed
        )

    def _all_reduce(self, nbytes: int) -> float:
        repeats, shared = 300 if nbytes < 1e6 else 30, self.groups.shared(AXES)
        if shared is None:
            x, group = self._random((nbytes // 4,)), Distributed(self.groups[AXES])
            return self._median(lambda: group.all_reduce(x, "max"), repeats=repeats)
        lying = shared.empty((nbytes // 4,), torch.float32)
        lying.fill_(1.0)
        return self._median(lambda: shared.all_reduce_([lying], "max"), repeats=repeats)

    def _message(self) -> float:
        """Bytes a second of a copy between two processes: written by one, read by the other."""
        if self.device.type == "cuda":
            return math.inf
        x = self._random((_LARGE_NBYTES // 4,))
        return _LARGE_NBYTES / (2 * self._median(lambda: x.clone(), 0.5))


if __name__ == "__main__":
    made = _RankMeasurement(float(sys.argv[2]))
    rank = os.environ.get("RANK", "0")
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(made.found()))
