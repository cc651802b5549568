"""A plan's question about this machine, or hosts like it: processors, or GPUs, with kernels timed here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tutti.graph.ops.matmul import is_faster
from tutti.hardware.cluster import Cluster
from tutti.hardware.figures import Figure
from tutti.planner.estimates.priced_machine import MeasuredKernels, PricedMachine
from tutti.planning.hardware_files import NAME, cluster_of
from tutti.planning.kernel_times import KernelTimes
from tutti.planning.layout_plan import PlanQuestion
from tutti.planning.processor_speed import ProcessorSpeed
from tutti.planning.timed_kernels import TimedKernels


def question_here(
    text: str = NAME, topology: str | None = None, *, num_ranks: int | None = None, **options: Any
) -> PlanQuestion:
    """The question, with the options of `PlanQuestion`.

    Args:
        text: `this-machine`, or `16 x this-machine` for hosts like it.
        topology: in place of the measured one.
        num_ranks: try only layouts of so many ranks; on one host they share its processors.

    Raises:
        PlanError: this machine has not been calibrated.
    """
    cluster = cluster_of(text, topology)
    if cluster.num_hosts == 1 and not torch.cuda.is_available():
        cluster = shared_by(cluster, num_ranks or cluster.count)
    timed = kernels_timed(cluster)
    return PlanQuestion(
        cluster,
        lambda layout: machine_here(cluster, layout.num_ranks, timed),
        num_ranks=num_ranks,
        **options,
    )


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


def kernels_timed(cluster: Cluster) -> Callable[[int, int], TimedKernels]:
    """The `TimedKernels` of a plan on this machine, or hosts like it, by processes and threads of each.

    Layouts with as many processes share their times, and all of them the processor's speed. Links between
    hosts do not change with it.
    """
    calibrated = cluster.device.probe_seconds
    probe = calibrated.value if calibrated else None
    speed = ProcessorSpeed(probe, fixed=cluster.num_hosts > 1)

    @cache
    def timed(num_processes: int, num_threads: int) -> TimedKernels:
        return TimedKernels(num_processes, num_threads, KernelTimes(num_processes, speed))

    return timed


def machine_here(
    cluster: Cluster, num_ranks: int, timed: Callable[[int, int], TimedKernels] | None = None
) -> PricedMachine:
    """This machine for a run of so many ranks: on a GPU by its data, on processors with kernels timed.

    More ranks than processors take turns (`ranks_per_processor`): the kernels are then timed on two processes
    a processor, which empty each other's caches. `timed`: that of the plan, by default a new one. Estimates
    are at the speed of the calibration; `pace` says what a second of them is now.
    """
    if torch.cuda.is_available():
        return PricedMachine.of(cluster)
    if cluster.num_hosts == 1:
        cluster = shared_by(cluster, num_ranks)
    processors, neighbors = os.cpu_count() or 1, min(num_ranks, cluster.topology.host_size)
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, processors // neighbors)))
    share = max(1.0, neighbors * threads / processors)
    most = max(1, (2 if share > 1 else 1) * processors // threads)
    kernels = (timed or kernels_timed(cluster))(min(neighbors, most), threads)
    start = cluster.topology.inside.start.value
    crowded = cluster.topology.inside.crowded_start if share > 1 else None
    if crowded is not None:
        cluster = _starting(cluster, crowded)
    call = cluster.device.call_seconds
    return PricedMachine(
        cluster,
        MeasuredKernels(kernels),
        launch_seconds=0.0,
        call_seconds=call.value if call else 0.0,
        ranks_per_processor=share,
        message_start=share * crowded.value if crowded else 0.0,
        value_start=start,
        shares_memory=True,
        onednn=is_faster(),
        settled=MeasuredKernels(kernels.settled),
        pace=kernels.times.factor,
    )


def _starting(cluster: Cluster, start: Figure) -> Cluster:
    """The cluster whose exchanges within a host have this start."""
    topology = cluster.topology
    inside = replace(topology.inside, start=start)
    return replace(cluster, topology=replace(topology, inside=inside))
