"""What every process of a calibration has: its device, the others, the speed probe, kernels of a step."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.transport import Distributed
from tutti.errors import PlanError
from tutti.launch.launch import launch
from tutti.launch.ranks import choose_gpu, ensure_process_group
from tutti.planning.speed_probe import SpeedProbe

AXES = ("data",)
SMALL_NBYTES = 64
# The launcher's exit code after a signal is this and the signal's number.
_SIGNALED = 128
_MOST_ROUNDS, _ROUND_SECONDS = 5, 0.1


def found_by_ranks(count: int, script: str, seconds: float) -> list[dict[str, float]]:
    """Run a script on so many processes of this host; each calls `write_found`.

    Raises:
        PlanError: the processes failed.
        SystemExit: a signal ended them, of which the launcher has told.
    """
    with tempfile.TemporaryDirectory() as folder:
        layout = f"data={count}" if count > 1 else ""
        code = launch(count, script, [folder, str(seconds)], layout)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if code > _SIGNALED:
        raise SystemExit(code)
    if code or len(ranks) != count:
        raise PlanError("the calibration failed", why=f"its processes ended with {code}")
    return ranks


def write_found(folder: str, figures: dict[str, float]) -> None:
    """Hand the figures of this process to `found_by_ranks`."""
    (Path(folder) / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))


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


class RankMeasurement:
    """One process of a measurement, in step with the others.

    Seconds and rates are relative to the speed probe until all of them are found; on a GPU they are plain.

    Args:
        seconds: of one measurement, in all rounds together.
        now: the clock of the probe; by default the wall's.
    """

    def __init__(self, seconds: float, now: Callable[[], float] | None = None) -> None:
        self.num_rounds = min(_MOST_ROUNDS, max(1, int(seconds / _ROUND_SECONDS)))
        self.seconds = seconds / self.num_rounds
        ensure_process_group()
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = rank_device()
        self.groups = Groups({"data": self.count}, [AXES] if self.count > 1 else [])
        self.probe = SpeedProbe(now or time.perf_counter) if self.device.type == "cpu" else None
        self.probes: list[float] = []

    @property
    def usual(self) -> float:
        """Seconds of the probe, the median so far; 1 without one."""
        return statistics.median(self.probes) if self.probes else 1.0

    @contextmanager
    def speed(self) -> Iterator[list[float]]:
        """Context whose list holds, afterwards, the seconds of the probe before and after it."""
        found = [1.0 if self.probe is None else self.probe()]
        yield found
        if self.probe is not None:
            found.append(self.probe())
            self.probes += found

    def meet(self) -> None:
        """Wait for the other processes."""
        if self.count > 1:
            torch.distributed.barrier()

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal random numbers on this device."""
        return torch.randn(shape, device=self.device).to(dtype)

    def kernels(self) -> Callable[[], None]:
        """Kernels of about a millisecond, as between two collectives of a step."""
        x, weight = self.random((128, 512)), self.random((512, 512))
        large, out = self.random((1 << 20,)), self.random((1 << 20,))

        def run() -> None:
            torch.nn.functional.linear(x, weight)
            torch.add(large, 1.0, out=out)

        return run

    def small_reduce(self) -> Callable[[], object]:
        """An all-reduce of a few bytes."""
        shared, few = self.groups.shared(AXES), self.random((SMALL_NBYTES // 4,))
        reduce = Distributed(self.groups[AXES]).all_reduce if shared is None else shared.all_reduce
        return lambda: reduce(few, "max")
