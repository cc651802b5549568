"""How long a step waits for a save: one in the background next to one at once, and next to a step.

    python -m benchmarks.saves                     # the GPTs of 29.5 and 51 M parameters, one and two ranks
    python -m benchmarks.saves --models gpt-51M --layouts "data=2" --rounds 10

Both ways take turns in one run: a save, and steps until all of it is written. Prints the median seconds of a
step without a save, of a `tick` that saves in each way, and what the steps beside a background save take
longer, in sum, than steps alone. The folder is in $TMPDIR.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tutti
from benchmarks.command_line import parser
from benchmarks.models import CASES, Case, optimizer, plain_step
from benchmarks.own_ranks import start_ranks
from tutti.launch.ranks import ensure_process_group
from tutti.resuming.background_saves import BUSY

MODELS, LAYOUTS, NUM_ROUNDS = ("gpt-29.5M", "gpt-51M"), ("data=1", "data=2", "data=2 zero=3"), 7
NUM_STEPS = 5


class Timed:
    """A run whose saves are begun from outside."""

    def __init__(self, case: Case, layout: str, folder: Path, *, asynchronous: bool) -> None:
        model = case.model()
        self.step = tutti.distribute(plain_step(case), model, optimizer(model), layout)
        self.batch = case.batch(0, dist.get_world_size() if dist.is_initialized() else 1)
        self.checkpoints = tutti.Checkpoints(
            folder, every="1 h", keep=1, step=self.step, asynchronous=asynchronous
        )

    def steps(self) -> tuple[list[float], float]:
        """The seconds of `NUM_STEPS` steps, and of a save after the last, as `tick` makes it."""
        seconds = []
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            self.step(*self.batch)
            seconds.append(time.perf_counter() - began)
            self.checkpoints.tick()
        any_of(False)  # ranks begin together
        began = time.perf_counter()
        self.checkpoints._save(self.checkpoints._saver.save_soon)
        return seconds, time.perf_counter() - began

    def until_written(self) -> list[float]:
        """The seconds of steps beside the save, until all ranks' processes have written it."""
        seconds = []
        while True:
            began = time.perf_counter()
            self.step(*self.batch)
            seconds.append(time.perf_counter() - began)
            background = self.checkpoints._saver._background
            if not any_of(background is not None and background.state() == BUSY):
                self.checkpoints._saver.is_settled()
                return seconds


def any_of(mine: bool) -> bool:
    """Whether it holds on any rank."""
    if not dist.is_initialized():
        return mine
    found = torch.tensor(int(mine))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def measure(model: str, layout: str, num_rounds: int, folder: Path) -> None:
    """On a rank: the medians of both ways."""
    case = CASES[model]
    ways = {
        name: Timed(case, layout, folder / name, asynchronous=name == "background")
        for name in ("at once", "background")
    }
    ticks: dict[str, list[float]] = {name: [] for name in ways}
    alone: list[float] = []
    longer: list[float] = []
    for k in range(num_rounds + 1):
        for name, one in ways.items():
            seconds, tick = one.steps()
            beside = one.until_written()
            if k:  # the first round starts the process
                ticks[name].append(tick)
                alone += seconds[1:]
                if name == "background":
                    longer.append(sum(beside) - len(beside) * statistics.median(alone))
    for one in ways.values():
        one.checkpoints.close()
    if not dist.is_initialized() or dist.get_rank() == 0:
        step, late = statistics.median(alone), statistics.median(longer)
        once, soon = (statistics.median(ticks[name]) for name in ways)
        print(
            f"{model:10} {layout:14} step {step * 1e3:5.0f} ms, save at once {once * 1e3:5.0f} ms, "
            f"in the background {soon * 1e3:4.0f} ms: {soon / once:.3f} of it, {soon / step:.3f} of a step; "
            f"steps beside it {late * 1e3:4.0f} ms longer in sum",
            flush=True,
        )


def main() -> None:
    """Start the ranks of each layout."""
    args = parser(
        __doc__, models=list(MODELS), layouts=list(LAYOUTS), rounds=NUM_ROUNDS, out=None
    ).parse_args()
    if "RANK" in os.environ:
        ensure_process_group()
        measure(args.models[0], args.layouts[0], args.rounds, args.out)
        return
    for model in args.models:
        for layout in args.layouts:
            with tempfile.TemporaryDirectory() as folder:
                words = ["--models", model, "--layouts", layout, "--rounds", str(args.rounds)]
                start_ranks(__file__, *words, "--out", folder, layout=layout)


if __name__ == "__main__":
    main()
