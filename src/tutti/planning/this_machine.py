"""A plan's question about this machine: its processors, or its GPUs, with kernels timed here."""

from __future__ import annotations

import os
from typing import Any

import torch

from tutti.graph.ops.matmul import is_faster
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.hardware.cluster import Cluster
from tutti.planning.hardware_files import cluster_here
from tutti.planning.layout_plan import PlanQuestion
from tutti.planning.timed_kernels import TimedKernels


def question_here(**options: Any) -> PlanQuestion:
    """The question, with the options of `PlanQuestion`.

    Raises:
        PlanError: this machine has not been calibrated.
    """
    cluster = cluster_here()
    return PlanQuestion(cluster, lambda layout: machine_here(cluster, layout.num_ranks), **options)


def machine_here(cluster: Cluster, num_ranks: int) -> PricedMachine:
    """This machine for a run of so many ranks: on a GPU by its data, on processors with kernels timed."""
    if torch.cuda.is_available():
        return PricedMachine.of(cluster)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    call = cluster.device.call_seconds
    return PricedMachine(
        cluster,
        TimedKernels(num_ranks, int(os.environ.get("OMP_NUM_THREADS", threads))),
        launch_seconds=0.0,
        call_seconds=call.value if call else 0.0,
        shares_memory=True,
        onednn=is_faster(),
    )
