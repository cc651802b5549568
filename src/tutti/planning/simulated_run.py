"""A user's step on a clock, on any devices: its timeline, faults, failures, replicas, workers of servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from tutti.errors import PlanError
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.graph_clock import TraceEvent
from tutti.planner.estimates.layout_estimate import Estimate, traced
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.runs.goodput import Reliability
from tutti.planner.runs.worker_clock import WorkersPlayed, play_workers
from tutti.planning.candidate_programs import CandidatePrograms, num_rows, with_rows
from tutti.planning.layout_plan import usable_nbytes
from tutti.planning.replica_rounds import PricedRounds, priced_rounds
from tutti.propagate.batch_dim import warn_of_micro, warn_of_uneven
from tutti.replicas.replica_rows import rows as rows_of_replica
from tutti.torch_private.pytrees import tree_flatten


@dataclass(frozen=True)
class Faults:
    """straggler: how many times as long one rank computes. slow_link: share of the rate between hosts."""

    straggler: float = 1.0
    slow_link: float = 1.0


@dataclass(frozen=True)
class Recovery:
    """Seconds: between failures of one device, of a checkpoint, of a restart."""

    mtbf: float
    save: float
    restart: float


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated step and run.

    estimate: of a step, with its share of rounds. events: of one rank of each pipeline rank. sound: seconds
    of a step without faults. capacity: bytes of a device that a step may use. reliability: with the best
    interval between checkpoints and its goodput. workers: of servers, with their number; sound_workers: these
    without faults. rounds: of replicas without servers.
    """

    estimate: Estimate
    events: Sequence[Sequence[TraceEvent]]
    sound: float
    capacity: float
    reliability: Reliability | None = None
    workers: WorkersPlayed | None = None
    sound_workers: WorkersPlayed | None = None
    rounds: PricedRounds | None = None

    @property
    def played(self) -> float:
        """Seconds of the events: of the step alone."""
        return self.estimate.seconds - (self.rounds.seconds if self.rounds else 0.0)

    @property
    def missing_nbytes(self) -> float:
        """That the step needs beyond the memory of a device; 0 if it fits."""
        return max(0.0, self.estimate.peak_nbytes - self.capacity)


def simulated_run(
    job: Job,
    batch: tuple[Any, ...],
    cluster: Cluster,
    faults: Faults,
    recovery: Recovery | None,
    *,
    rows: int | None = None,
    serve: float = 0.0,
) -> SimulatedRun:
    """Play a step of `job` under its layout on a cluster.

    Args:
        job: with the layout.
        batch: of a call.
        cluster: as many devices as the layout has ranks, or more.
        faults: of a rank and of links.
        recovery: from failures; None without any.
        rows: samples of the global batch; by default those of `batch`.
        serve: seconds of a server for one push.

    Raises:
        PlanError: too few devices.
        ShardingError, LayoutError: the step does not allow the layout.

    It warns of a batch that does not divide, as a run does.
    """
    layout = job.layout
    if layout.num_ranks > cluster.count:
        raise PlanError(
            f'layout "{layout}" has {layout.num_ranks} ranks, and there are {cluster.count} devices',
            fix=f'--devices "{layout.num_ranks} x ...", or a smaller layout',
        )
    if rows is not None and rows != num_rows(batch):
        batch = with_rows(batch, rows)
    one = replace(layout, axes=_of_one_replica(layout), sync="", server=0)
    if layout.num_replicas > 1:
        leaves = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
        rows_of_replica(leaves, 0, layout.num_replicas)  # refuses a batch that does not divide
        batch = with_rows(batch, num_rows(batch) // layout.num_replicas)
    program = CandidatePrograms(replace(job, layout=one), batch, on_processors=False).program(one)
    warn_of_uneven(program.plan.unsplit)
    warn_of_micro(one.micro, program.layout.micro)
    sound, _ = traced(program, PricedMachine.of(cluster), cut_at=job.cut)
    machine = PricedMachine.of(_slower(cluster, faults.slow_link))
    slow = {_busiest(sound): faults.straggler} if faults.straggler > 1 else {}
    estimate, events = traced(program, machine, cut_at=job.cut, slow=slow)
    workers = sound_workers = rounds = None
    sound_seconds = sound.seconds
    if layout.num_replicas > 1 and not layout.server:
        priced = partial(priced_rounds, program, layout, cut_at=job.cut)
        sound_seconds += priced(cluster.topology, sound.seconds).seconds
        rounds = priced(machine.topology, estimate.seconds)
        estimate = rounds.added_to(estimate)
    elif layout.server:
        times = [sound.seconds] * (layout.num_replicas - 1) + [estimate.seconds]
        workers = play_workers(times, serve, _ahead(layout))
        sound_workers = play_workers([sound.seconds] * layout.num_replicas, serve, _ahead(layout))
    reliability = None
    if recovery is not None:
        reliability = Reliability(
            _num_at_work(layout, cluster), recovery.mtbf, recovery.save, recovery.restart
        )
    return SimulatedRun(
        estimate,
        events,
        sound_seconds,
        usable_nbytes(cluster.device),
        reliability,
        workers,
        sound_workers,
        rounds,
    )


def _num_at_work(layout: Layout, cluster: Cluster) -> int:
    """Devices whose failure ends the run: those of ranks, and of servers as far as devices are left."""
    return min(cluster.count, layout.num_ranks + layout.server)


def _of_one_replica(layout: Layout) -> dict[str, int]:
    return {a: n for a, n in layout.axes.items() if a != "replica"}


def _ahead(layout: Layout) -> float:
    """Rounds that a worker of servers may be ahead of the slowest."""
    name, _, bound = layout.sync.rstrip(")").partition("(")
    if name == "bounded":
        return float(bound or 1)
    return 0.0 if name == "step" else math.inf


def _busiest(estimate: Estimate) -> int:
    """The pipeline rank that works the longest: a slow rank there costs most."""
    if estimate.timeline is None:
        return 0
    idle = estimate.timeline.idle_seconds
    return min(range(len(idle)), key=lambda rank: idle[rank])


def _slower(cluster: Cluster, share: float) -> Cluster:
    link = cluster.topology.between
    rate = replace(link.bandwidth, value=share * link.bandwidth.value)
    topology = replace(cluster.topology, between=replace(link, bandwidth=rate))
    return replace(cluster, topology=topology)
