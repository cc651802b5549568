"""The time and the memory of a step under one layout, from the program that its ranks would run.

    one device, or ranks side by side     the final graph on a clock               graph_clock.py
    micro-batches                         before + the row of parts + after
    pipeline                              before + the schedule on a clock + after  simulator.py

Every pass has run: the graph is the one that a rank would execute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from tutti.costs.kernel_seconds import ARITHMETIC, LAUNCHES
from tutti.costs.rank_groups import RankGroups
from tutti.graph.analysis.cost import flops_of, model_flops_of, rates_for
from tutti.graph.ops.loop import REDUCE, Body
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.pipeline.targets import shared_axes
from tutti.pipeline.timed import Timed
from tutti.planner.estimates.graph_clock import (
    COMPUTE,
    IDLE,
    MESSAGES,
    SHARED,
    GraphClock,
    Playback,
    TraceEvent,
    body_of,
    kinds_of,
    main_loop,
    message_stream,
    without_rounding,
)
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.memory import PeakMemory, predict
from tutti.planner.simulator import Timeline, simulate
from tutti.torch_private.pytrees import tree_leaves


@dataclass(frozen=True)
class Estimate:
    """A step under `layout`, predicted.

    seconds: of a step. kinds: of the busiest rank, seconds by kind: compute, collectives, messages (those for
    which the ranks of a pipeline wait), idle.
    limits: seconds of compute by what they are for: arithmetic, memory, launches; empty if it is not known.
    hidden_seconds: of collectives beside compute. nbytes: sent by a rank, by link (`inside`, `between`).
    peak_nbytes: of the rank that holds most. memory: its kinds, if the whole program was at hand.
    timeline: of a pipeline.
    """

    layout: Layout
    seconds: float
    kinds: dict[str, float]
    hidden_seconds: float
    nbytes: dict[str, int]
    peak_nbytes: int
    memory: PeakMemory | None = None
    timeline: Timeline | None = None
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def bound_by(self) -> str:
        """The kind with the most seconds; of compute `memory` or `launches`, if most of it is for these."""
        kind = max(self.kinds, key=self.kinds.__getitem__, default=COMPUTE)
        limit = max(self.limits, key=self.limits.__getitem__, default=ARITHMETIC)
        return kind if kind != COMPUTE or limit == ARITHMETIC else limit

    def slower(self, factor: float) -> Estimate:
        """The same on devices and links that all take `factor` times as long."""
        return replace(
            self,
            seconds=factor * self.seconds,
            kinds={kind: factor * x for kind, x in self.kinds.items()},
            limits={limit: factor * x for limit, x in self.limits.items()},
            hidden_seconds=factor * self.hidden_seconds,
            timeline=self.timeline and self.timeline.slower(factor),
        )


def estimate(program: Program, machine: PricedMachine, *, cut_at: tuple[str, ...] = ()) -> Estimate:
    """The estimate of a partitioned program.

    Raises:
        ShardingError, LayoutError: the step does not allow micro-batches, or this cut.
        PlanError: a dtype without a peak.
    """
    return _ProgramEstimate(program, machine, cut_at).make()


def traced(
    program: Program,
    machine: PricedMachine,
    *,
    cut_at: tuple[str, ...] = (),
    slow: Mapping[int, float] = MappingProxyType({}),
) -> tuple[Estimate, list[list[TraceEvent]]]:
    """The estimate with the events of one rank of each pipeline rank; the other ranks have the same.

    Args:
        program: of a layout.
        machine: its hardware.
        cut_at: as in `estimate`.
        slow: by pipeline rank, how many times as long a rank of it computes: the ranks beside it wait for it.

    Raises:
        ShardingError, LayoutError: as `estimate`.
    """
    made = _ProgramEstimate(program, machine, cut_at, records=True, slow=slow)
    return made.make(), made.events


def flops_of_nodes(nodes: Iterable[fx.Node]) -> float:
    """Multiplications and additions of matmuls, convolutions and attention in a captured step.

    Attention counts every pair of tokens, masked ones, too, and the backward nothing that its kernel
    recomputes: the convention of PaLM's and Megatron's formulas.
    """
    return sum(map(model_flops_of, nodes))


def dtype_of_nodes(nodes: Iterable[fx.Node]) -> torch.dtype:
    """The dtype in which most of these operations compute; float32 without any."""
    found: Counter[torch.dtype] = Counter()
    for node in nodes:
        val = node.meta.get("val")
        made = next((x for x in tree_leaves(val) if isinstance(x, Tensor)), None)
        if made is not None and made.dtype.is_floating_point:
            found[made.dtype] += flops_of(node)  # type: ignore[assignment]
    return max(found, key=lambda dtype: found[dtype], default=torch.float32)


class _ProgramEstimate:
    def __init__(
        self,
        program: Program,
        machine: PricedMachine,
        cut_at: tuple[str, ...],
        *,
        records: bool = False,
        slow: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self.program, self.machine, self.cut_at = program, machine, cut_at
        self.layout = program.layout
        self.events: list[list[TraceEvent]] = []
        groups = RankGroups(self.layout.mesh, machine.topology.host_size)
        self.clocks = [
            GraphClock(machine.slower(slow[p]) if p in slow else machine, groups, records=records)
            for p in range(self.layout.axes.get("pipe", 1))
        ]

    def make(self) -> Estimate:
        with rates_for("cpu" if self.machine.shares_memory else "cuda"):  # as a run cuts its stages
            return self._made()

    def _made(self) -> Estimate:
        if self.layout.in_time:
            target = self._target(self.program)
            made = in_time(self.program, cut_at=self.cut_at, target=target)
            programs = made.programs
        else:
            made, programs = None, [self.program]
        graphs = [self._final(one) for one in programs]
        pairs = zip(programs, graphs, strict=True)
        memory = max((predict(p, g) for p, g in pairs), key=lambda m: m.peak_nbytes)
        if made is not None and len(graphs) > 1:
            return self._pipeline(made, graphs, memory)
        played = self.clocks[0].whole(graphs[0])
        self.events = [played.events]
        return self._estimate(played, self._share * played.seconds, memory)

    def _target(self, program: Program) -> Target:
        """Of the layout's program, or of that of a pipeline rank."""
        groups, shares = self.clocks[0].groups, self.machine.shares_memory
        shared = shared_axes(program, lambda axes: shares and groups[axes].num_hosts == 1)
        updated = frozenset(self.program.captured.updated)
        return Target(donated=updated, shared=shared, onednn=self.machine.onednn, gpus=not shares)

    def _final(self, program: Program) -> fx.Graph:
        return optimized(program, self._target(program))

    def _estimate(
        self,
        played: Playback,
        shared: float,
        memory: PeakMemory,
        timeline: Timeline | None = None,
    ) -> Estimate:
        """`shared`: the seconds of ranks that share processors."""
        call = self.machine.call_seconds
        seconds = shared + self._share * call
        played.kinds[COMPUTE] += call  # type: ignore[assignment]
        if played.limits:
            played.limits[LAUNCHES] += call  # type: ignore[assignment]
        played.kinds[SHARED] += seconds - played.seconds - call  # type: ignore[assignment]
        return Estimate(
            layout=self.layout,
            seconds=seconds,
            kinds=kinds_of(played.kinds),
            hidden_seconds=without_rounding(played.hidden_seconds),
            nbytes={link: n for link, n in played.nbytes.items() if n},
            peak_nbytes=memory.peak_nbytes,
            memory=memory,
            timeline=timeline,
            limits=kinds_of(played.limits),
        )

    def _pipeline(self, made: Timed, graphs: list[fx.Graph], memory: PeakMemory) -> Estimate:
        pairs = list(zip(self.clocks, graphs, strict=True))
        played = [clock.play(graph) for clock, graph in pairs]
        loops = [main_loop(graph) for graph in graphs]
        bodies = [body_of(node) if node is not None else None for node in loops]
        parts = [
            clock.parts(body) if body else {}
            for clock, body in zip(self.clocks, bodies, strict=True)
        ]
        timeline = self._timeline(made, parts)
        busiest = max(range(len(played)), key=lambda p: played[p][1].seconds)
        total = Playback()
        for part in played[busiest]:
            total.add(part)
        first = max(before.seconds for before, _, _ in played)
        last = max(after.seconds for _, _, after in played)
        whole = first + timeline.seconds + last
        # It waits within the schedule, and for ranks with longer parts before and after.
        waiting = max(0.0, whole - total.seconds)
        for_messages = min(waiting, timeline.message_seconds[busiest])
        total.kinds[MESSAGES] += for_messages  # type: ignore[assignment]
        total.kinds[IDLE] += waiting - for_messages  # type: ignore[assignment]
        total.seconds = whole
        total.nbytes = self._most_sent(made, played, bodies)
        for pipe_rank, (before, _, after) in enumerate(played):
            ends = before.events, [e.later(first + timeline.seconds) for e in after.events]
            self.events.append(
                [*ends[0], *self._row_events(made, timeline, parts, pipe_rank, first), *ends[1]]
            )
        shared = self._share * (first + last) + timeline.shared_seconds(self._share)
        return self._estimate(total, shared, memory, timeline)

    @property
    def _share(self) -> float:
        return self.machine.ranks_per_processor

    def _most_sent(
        self, made: Timed, played: list[tuple[Playback, Playback, Playback]], bodies: list[Any]
    ) -> Counter[str]:
        """The most bytes that a pipeline rank sends, of each link."""
        most: Counter[str] = Counter()
        for pipe_rank, (parts, body) in enumerate(zip(played, bodies, strict=True)):
            sent = sum((part.nbytes for part in parts), Counter[str]())
            sent[self.clocks[0].message_link] += _sent_nbytes(made, body, pipe_rank) if body else 0
            most |= sent
        return most

    def _row_events(
        self,
        made: Timed,
        timeline: Timeline,
        parts: list[dict[tuple[int, str], Playback]],
        pipe_rank: int,
        first: float,
    ) -> Iterator[TraceEvent]:
        """The events of a pipeline rank's row, which begins at `first`; its sends among them."""
        sizes, known, row = _message_sizes(made), parts[pipe_rank], timeline.rows[pipe_rank]
        reduced = {key for key in known if key[1] == REDUCE}
        for (action, start, end), after in zip_longest(row, row[1:]):
            if after is not None and (after.action.stage, after.action.kind) in reduced:
                continue  # the events of the reductions have those of the backward before them
            played = known.get((action.stage, action.kind), Playback())
            if action.kind == REDUCE:
                start = end - played.seconds  # it waits first, see `_waits`
            yield from (event.later(first + start) for event in played.events)
        for action, start, end in timeline.transfers:
            if timeline.schedule.rank_of(action.stage) == pipe_rank:
                stream = message_stream(timeline.schedule.rank_of(action.peer))
                nbytes = sum(sizes.get((action.stage, action.moved, action.peer), ()))
                words = f"send {action}"
                yield TraceEvent(words, stream, first + start, end - start, nbytes=nbytes, group=2)

    def _timeline(self, made: Timed, parts: list[dict[tuple[int, str], Playback]]) -> Timeline:
        costs = {key: one.seconds for found in parts for key, one in found.items()}
        schedule = made.schedule
        for stage in range(schedule.num_stages):
            for kind in ("F", "I", "W", "B"):  # a part without work is in no body
                costs.setdefault((stage, kind), 0.0)
        transfers: dict[tuple[int, int], float] = {}
        crosses = self.clocks[0].groups.crosses_hosts("pipe")
        for (source, kind, to), sizes in _message_sizes(made).items():
            edge = min(source, to), max(source, to)
            apart = schedule.rank_of(source) != schedule.rank_of(to)
            seconds = self.clocks[0].message(sum(sizes)) if apart else 0.0
            transfers[edge] = max(transfers.get(edge, 0.0), seconds)
            if apart:  # both ranks copy the values, if they share memory
                for stage in (source, to):
                    costs[stage, kind] += self.machine.message_work(sizes, across_hosts=crosses)
        given: dict[str, Any] = {"transfer_seconds": transfers, "edges": sorted(transfers)}
        timeline = simulate(schedule, costs, **given)
        waits = _waits(timeline, parts)
        if not any(waits.values()):
            return timeline
        return simulate(
            schedule, costs | {k: costs.get(k, 0.0) + x for k, x in waits.items()}, **given
        )


def _waits(
    timeline: Timeline, parts: list[dict[tuple[int, str], Playback]]
) -> dict[tuple[int, str], float]:
    """The seconds for which a stage's last backward waits for the reductions of the stage before it on its
    rank, by the reductions of the stage (`late_ends`)."""
    found = {}
    for spans, known in zip(timeline.rows, parts, strict=True):
        free = 0.0
        for before, span in pairwise(spans):
            if span.action.kind == REDUCE:
                key = span.action.stage, REDUCE
                found[key] = max(0.0, free - before.start)
                free = span.end + known[key].open_seconds if key in known else 0.0
    return found


def _message_sizes(made: Timed) -> dict[tuple[int, str, int], list[int]]:
    """The bytes of a message's values, by the stage that sends, its action, the stage that receives."""
    return {
        key: [body.vals[n].nbytes for n in names]
        for body in made.bodies
        for key, names in body.messages.items()
    }


def _sent_nbytes(made: Timed, body: Body, pipe_rank: int) -> int:
    """Bytes that a pipeline rank sends to others in a step."""
    rank_of = made.schedule.rank_of
    return body.num_micro * sum(
        body.vals[n].nbytes
        for (source, _, to), names in body.messages.items()
        if rank_of(source) == pipe_rank != rank_of(to)
        for n in names
    )
