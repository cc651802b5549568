"""A plan's question about this machine, or hosts like it: processors, or GPUs, with kernels timed here."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tutti.graph.ops.matmul import is_faster
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.hardware.cluster import Cluster
from tutti.planning.hardware_files import NAME, cluster_of
from tutti.planning.layout_plan import PlanQuestion
from tutti.planning.timed_kernels import TimedKernels


def question_here(
    text: str = NAME, topology: str | None = None, *, num_ranks: int | None = None, **options: Any
) -> PlanQuestion:
    """The question, with the options of `PlanQuestion`.

    Args:
        text: `this-machine`, or `16 x this-machine` for hosts like it.
        topology: in place of the measured one.
        num_ranks: try only layouts of so many ranks, on as many hosts as they need.

    Raises:
        PlanError: this machine has not been calibrated.
    """
    found = cluster_of(text, topology)
    cluster = replace(found, count=max(found.count, num_ranks or 1))
    return PlanQuestion(
        cluster,
        lambda layout: machine_here(cluster, layout.num_ranks),
        num_ranks=num_ranks,
        **options,
    )


def machine_here(cluster: Cluster, num_ranks: int) -> PricedMachine:
    """This machine for a run of so many ranks: on a GPU by its data, on processors with kernels timed."""
    if torch.cuda.is_available():
        return PricedMachine.of(cluster)
    neighbors = min(num_ranks, cluster.topology.host_size)
    threads = max(1, (os.cpu_count() or 1) // neighbors)
    call = cluster.device.call_seconds
    return PricedMachine(
        cluster,
        TimedKernels(neighbors, int(os.environ.get("OMP_NUM_THREADS", threads))),
        launch_seconds=0.0,
        call_seconds=call.value if call else 0.0,
        shares_memory=True,
        onednn=is_faster(),
    )
