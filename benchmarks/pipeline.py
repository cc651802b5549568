"""Pipelines as they run against what the simulator says, and how evenly stages are cut.

    python -m benchmarks.pipeline                 # the three GPTs, and a Llama with a large vocabulary
    python -m benchmarks.pipeline --schedule zb

For each model: the time that each stage's actions take, measured while the pipeline runs; the step that the
simulator makes of these times, with what lies outside of the loop; and the step as measured. Medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tutti
from benchmarks.command_line import chosen, parser
from benchmarks.models import CASES, Case, LlamaCase, optimizer, plain_step
from tutti.execution import loops
from tutti.graph.ops.loop import LoopPart
from tutti.graph.players.playing import Row, play
from tutti.planner.simulator import simulate

NUM_MICRO, NUM_STEPS, NUM_WARM = 8, 9, 3
LLAMA = LlamaCase(
    name="llama 6 layers, vocabulary 32k",
    vocab=32768,
    window=128,
    width=512,
    depth=6,
    hidden=1376,
    kv_heads=8,
    per_rank=8,
    in_micro=8,
)
MODELS: tuple[Case, ...] = (*(c for c in CASES.values() if c.in_micro), LLAMA)


class Clock:
    """Notes how long each part of a loop runs, and the whole loop."""

    def __init__(self) -> None:
        self.parts: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self.loop: list[float] = []
        self.names: dict[int, tuple[int, str]] = {}

    def call(self, engine: Any, part: LoopPart, *args: Any, **kwargs: Any) -> Any:
        """As `RowEngine.call`."""
        start = time.perf_counter()
        result = CALL(engine, part, *args, **kwargs)
        if id(part) in self.names:
            self.parts[self.names[id(part)]].append(time.perf_counter() - start)
        return result

    def play(self, row: Row, given: Any, engine: Any) -> Any:
        """As `play`."""
        body = row.body
        if len(body.parts) == 1:
            return PLAY(row, given, engine)  # the count of tokens beforehand
        self.names |= {id(part): key for key, part in body.parts.items()}
        start = time.perf_counter()
        result = PLAY(row, given, engine)
        self.loop.append(time.perf_counter() - start)
        return result


CALL, PLAY = loops.RowEngine.call, play


def main() -> None:
    """Start two ranks; each measures, the first prints."""
    known = {case.name: case for case in MODELS}
    command = parser(__doc__, models=list(known), schedule="1f1b")
    args = command.parse_args()
    cases = chosen(command, "models", args.models, known)
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        for case in cases:
            _run(case, args.schedule)
        return
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")]))
    ranks = [sys.executable, "-m", "tutti", "run", "-n", "2", __file__, *sys.argv[1:]]
    subprocess.run(ranks, check=True, env=os.environ | {"PYTHONPATH": path})


def _run(case: Case, schedule: str) -> None:
    clock = Clock()
    layout = f"pipe=2 micro={NUM_MICRO} schedule={schedule}"
    model = case.model()
    step = tutti.distribute(plain_step(case), model, optimizer(model), layout)
    batch = case.batch(0, 1)
    with (
        mock.patch.object(loops.RowEngine, "call", lambda *a, **k: clock.call(*a, **k)),
        mock.patch.object(loops, "play", clock.play),
    ):
        for _ in range(NUM_WARM):
            step(*batch)
        clock.parts.clear()
        clock.loop.clear()
        whole = [_timed(step, batch) for _ in range(NUM_STEPS)]
    found: list[Any] = [None] * dist.get_world_size()
    own = {k: statistics.median(v) for k, v in clock.parts.items()}
    dist.all_gather_object(found, (own, statistics.median(whole), statistics.median(clock.loop)))
    if dist.get_rank() == 0:
        _report(step, case, layout, found)


def _timed(step: tutti.Step, batch: tuple[Any, ...]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(*batch)
    return time.perf_counter() - start


def _report(step: tutti.Step, case: Case, layout: str, found: list[Any]) -> None:
    assert step._last is not None and step._last.execution.timed is not None
    made = step._last.execution.timed
    costs = {(s, k): t for own, _, _ in found for (s, k), t in own.items()}
    for stage in range(made.schedule.num_stages):
        for kind in {a.kind for row in made.schedule.rows for a in row}:
            costs.setdefault((stage, kind), 0.0)  # a first stage has no gradients of its inputs
    simulated = simulate(made.schedule, costs)
    outside = max(whole - loop for _, whole, loop in found)
    step_seconds = max(whole for _, whole, _ in found)
    says = simulated.seconds + outside
    work = [
        sum(t for (s, _), t in costs.items() if s == k) for k in range(made.schedule.num_stages)
    ]
    mean = sum(work) / len(work)
    predicted = made.stages.seconds()
    print(f'{case.name}, "{layout}"')
    for stage, seconds in enumerate(work):
        kinds = ", ".join(f"{k} {t * 1e3:.2f}" for (s, k), t in sorted(costs.items()) if s == stage)
        share = predicted[stage] / sum(predicted) * len(predicted)
        print(
            f"  stage {stage}: {seconds * 1e3:7.2f} ms a micro-batch ({kinds}), "
            f"{seconds / mean:.3f} of the mean, predicted {share:.3f}"
        )
    print(
        f"  step {step_seconds * 1e3:.1f} ms, simulated {says * 1e3:.1f} ms "
        f"(loop {simulated.seconds * 1e3:.1f} + outside {outside * 1e3:.1f}): "
        f"{step_seconds / says:.3f}"
    )


if __name__ == "__main__":
    main()
