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
from tutti.planner.estimates.priced_machine import PricedMachine
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
        num_ranks: try only layouts of so many ranks; on one host they share its processors.

    Raises:
        PlanError: this machine has not been calibrated.
    """
    cluster = cluster_of(text, topology)
    if cluster.num_hosts == 1 and not torch.cuda.is_available():
        cluster = shared_by(cluster, num_ranks or cluster.count)
    timed = cache(TimedKernels)  # layouts with as many processes share their times
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


def machine_here(
    cluster: Cluster, num_ranks: int, timed: Callable[..., TimedKernels] = TimedKernels
) -> PricedMachine:
    """This machine for a run of so many ranks: on a GPU by its data, on processors with kernels timed.

    More ranks than processors take turns (`ranks_per_processor`): the kernels are then timed by the
    processor's time, on two processes a processor, which empty each other's caches. `timed` makes the
    `TimedKernels`, or gives one that a plan has. Links and calls are as much slower or faster than at the
    calibration as the speed probe is.
    """
    if torch.cuda.is_available():
        return PricedMachine.of(cluster)
    if cluster.num_hosts == 1:
        cluster = shared_by(cluster, num_ranks)
    processors, neighbors = os.cpu_count() or 1, min(num_ranks, cluster.topology.host_size)
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, processors // neighbors)))
    share = max(1.0, neighbors * threads / processors)
    most = max(1, (2 if share > 1 else 1) * processors // threads)
    kernels = timed(min(neighbors, most), threads, in_turns=share > 1)
    if calibrated := cluster.device.probe_seconds:
        cluster = _at_speed(cluster, calibrated.value / kernels.probe_seconds())
    start = cluster.topology.inside.start.value
    crowded = cluster.topology.inside.crowded_start if share > 1 else None
    if crowded is not None:
        cluster = _starting(cluster, crowded)
    call = cluster.device.call_seconds
    return PricedMachine(
        cluster,
        kernels,
        launch_seconds=0.0,
        call_seconds=call.value if call else 0.0,
        ranks_per_processor=share,
        message_start=share * crowded.value if crowded else 0.0,
        value_start=start,
        shares_memory=True,
        onednn=is_faster(),
        settled=kernels.settled,
    )


def _at_speed(cluster: Cluster, factor: float) -> Cluster:
    """The cluster `factor` times as fast: calls, and the memory that ranks of a host exchange through."""
    device, topology = cluster.device, cluster.topology
    link = topology.inside
    if call := device.call_seconds:
        device = replace(device, call_seconds=_times(call, 1 / factor))
    inside = replace(
        link,
        start=_times(link.start, 1 / factor),
        bandwidth=_times(link.bandwidth, factor),
        crowded_start=link.crowded_start and _times(link.crowded_start, 1 / factor),
    )
    return Cluster(cluster.count, device, replace(topology, inside=inside))


def _times(figure: Figure, factor: float) -> Figure:
    return replace(figure, value=figure.value * factor)


def _starting(cluster: Cluster, start: Figure) -> Cluster:
    """The cluster whose exchanges within a host have this start."""
    topology = cluster.topology
    inside = replace(topology.inside, start=start)
    return replace(cluster, topology=replace(topology, inside=inside))
