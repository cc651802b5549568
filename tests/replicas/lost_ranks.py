"""Runs of every strategy at once, in which one rank is killed between two steps."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

import replicas_train as training
import tutti
from captured_once import captured_once

BAD_STEP, STEPS = 5, 14


def run(step: tutti.Step, begin: int, end: int) -> list[float]:
    """The losses of some steps, on 12 samples."""
    batches = ([x.repeat(2, 1)[:12] for x in training.batch_at(k)] for k in range(begin, end))
    with captured_once("replicas"):
        return [step(*batch).item() for batch in batches]


def train_without(
    syncs: list[str], layout: str, victim: int
) -> tuple[dict[str, list[float]], dict]:
    """The losses of the steps after the kill, and the weights at the end, by strategy."""
    steps = {
        sync: tutti.distribute(training.train_step, *training.make(), f"{layout} sync={sync}")
        for sync in syncs
    }
    for step in steps.values():
        run(step, 0, BAD_STEP)
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        losses = {sync: run(step, BAD_STEP, STEPS) for sync, step in steps.items()}
    except tutti.CommError:
        os._exit(1)  # as a script ends that has lost a rank of its own replica
    ends = {sync: training.state_of(step) for sync, step in steps.items()}
    lost = {tuple(s.agreeing.team.between.lost()) for s in steps.values()}  # type: ignore[union-attr]
    return losses, {"lost": lost, **ends}
