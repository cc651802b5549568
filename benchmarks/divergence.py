"""What it costs to see that all ranks are in the same call with the same inputs (`calls/divergence.py`).

    python -m benchmarks.divergence --layouts "data=2"     # two ranks, the GPT of 29.5 M parameters

Steps with it and without it take turns in one run. Their medians differ by less than a busy machine's noise,
so the calls themselves are timed as well: what `enter` and `leave` take of the processor's time, and what the
step takes of it, where they stand in a step, with all that they need cold.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist

import tutti
from benchmarks.command_line import parser
from benchmarks.models import CASES, optimizer, plain_step
from benchmarks.own_ranks import start_ranks
from tutti.calls.divergence import Divergence, _Watching

CASE, LAYOUTS, NUM_ROUNDS = "gpt-29.5M", ("data=2", "data=2 zero=3", "tensor=2"), 24


class _Timed(_Watching):
    """Notes the seconds of what it does before and after a step."""

    __slots__ = ()
    seconds: ClassVar[list[float]] = []

    def __enter__(self) -> None:
        began = time.thread_time()
        super().__enter__()
        self.seconds.append(time.thread_time() - began)

    def __exit__(self, *args: Any) -> None:
        began = time.thread_time()
        super().__exit__(*args)
        self.seconds[-1] += time.thread_time() - began


def measure(layout: str) -> None:
    """On a rank: the medians of both ways, and of what is timed."""
    case = CASES[CASE]
    model = case.model()
    place = {f"{n}.weight": "tensor, -" for n in case.columns}
    place |= {f"{n}.weight": "-, tensor" for n in case.rows}
    step = tutti.distribute(plain_step(case), model, optimizer(model), layout, place=place)
    batch = case.batch(0, 2)
    for _ in range(3):
        step(*batch)
    ways: dict[str, list[float]] = {"with": [], "without": []}
    busy: list[float] = []
    timed = lambda self, *args: _Timed(self, *args)  # noqa: E731
    for k in range(2 * NUM_ROUNDS):
        way = ("with", "without")[k % 2]
        made = timed if way == "with" else lambda self, *args: nullcontext()
        dist.barrier()
        with mock.patch.object(Divergence, "watching", made):
            began, worked = time.perf_counter(), time.thread_time()
            step(*batch)
            ways[way].append(time.perf_counter() - began)
            busy.append(time.thread_time() - worked)
    if dist.get_rank() == 0:
        seconds, work = statistics.median(ways["without"]), statistics.median(busy)
        own = statistics.mean(_Timed.seconds)  # weights are looked at in some calls only
        print(
            f"{layout:16} step {seconds * 1e3:7.1f} ms, with/without "
            f"{statistics.median(ways['with']) / seconds:.4f}, "
            f"enter and leave {own * 1e6:5.0f} us of {work * 1e3:.1f} ms of the processor: {own / work:.3%}"
        )


def main() -> None:
    """Start two ranks under each layout."""
    args = parser(__doc__, layouts=list(LAYOUTS)).parse_args()
    if "RANK" in os.environ:
        measure(*args.layouts)
        return
    for one in args.layouts:
        start_ranks(__file__, "--layouts", one, layout=one)


if __name__ == "__main__":
    main()
