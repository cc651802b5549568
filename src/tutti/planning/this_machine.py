"""A plan's question about this machine: its processors, or its GPUs, with kernels timed here."""

from __future__ import annotations

import os
from dataclasses import replace
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
    if not torch.cuda.is_available():
        cluster = shared_by(cluster, options.get("num_ranks") or cluster.count)
    return PlanQuestion(cluster, lambda layout: machine_here(cluster, layout.num_ranks), **options)


def shared_by(cluster: Cluster, num_ranks: int) -> Cluster:
    """This machine as so many devices: more ranks than devices are on one host, too, and share its memory."""
    if num_ranks <= cluster.count:
        return cluster
    device, topology = cluster.device, cluster.topology
    room = device.capacity.value * cluster.count / num_ranks
    size = replace(topology.devices_per_host, value=float(num_ranks))
    return Cluster(
        num_ranks,
        replace(device, capacity=replace(device.capacity, value=room)),
        replace(topology, devices_per_host=size),
    )


def machine_here(cluster: Cluster, num_ranks: int) -> PricedMachine:
    """This machine for a run of so many ranks: on a GPU by its data, on processors with kernels timed.

    With more ranks than processors the kernels are timed on as many processes as there are processors, and
    the ranks take turns (`ranks_per_processor`): a median of a few runs would miss the turns of
    others.
    """
    if torch.cuda.is_available():
        return PricedMachine.of(cluster)
    processors = os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, processors // num_ranks)))
    call = cluster.device.call_seconds
    return PricedMachine(
        shared_by(cluster, num_ranks),
        TimedKernels(min(num_ranks, max(1, processors // threads)), threads),
        launch_seconds=0.0,
        call_seconds=call.value if call else 0.0,
        ranks_per_processor=max(1.0, num_ranks * threads / processors),
        shares_memory=True,
        onednn=is_faster(),
    )
