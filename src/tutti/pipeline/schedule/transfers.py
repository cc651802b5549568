"""Passes that add transfers, gathers and reductions to a schedule of compute actions.

0F0 0F1 0B0 0B1        0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1
1F0 1B0 1F1 1B1   ->   1<0F0 1F0 1B0 1B0>0 1<0F1 1F1 1B1 1B1>0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import WEIGHT_GRADIENTS, Action
from tutti.pipeline.schedule.complete import check_complete
from tutti.pipeline.schedule.edges import Edges, Pairs
from tutti.pipeline.schedule.schedule import Row, Schedule


def with_transfers(schedule: Schedule, edges: Pairs | None = None) -> Schedule:
    """`schedule` with a send right after the maker of a value and a receive right before its reader.

    Values between two ranks, in one direction, keep the order of their makers. If a rank would read them in
    another order, a receive moves up, before that of the next value sent. No rank waits longer for that,
    since the next value could not arrive earlier anyway.

    Args:
        schedule: compute actions, and perhaps gathers and reductions.
        edges: pairs (maker, reader) of stages; by default each stage feeds the next. Stages of one rank
            need no transfer.

    Raises:
        ScheduleError: the schedule already has transfers, lacks an action or repeats one.
    """
    if schedule.has_transfers:
        raise ScheduleError(
            "the schedule has sends and receives already", fix="a schedule of compute actions"
        )
    check_complete(schedule)
    found = Edges(schedule, edges)
    sends = [[_sends(schedule, found, a) for a in row] for row in schedule.rows]
    streams: defaultdict[int, defaultdict[int, list[Action]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for send in (send for row in sends for after in row for send in after):
        streams[schedule.rank_of(send.peer)][schedule.rank_of(send.stage)].append(send)
    receives = [
        _receives(row, found, streams[rank].values()) for rank, row in enumerate(schedule.rows)
    ]
    return Schedule(
        tuple(
            tuple(
                b
                for before, action, after in zip(receives[rank], row, sends[rank], strict=True)
                for b in (*before, action, *after)
            )
            for rank, row in enumerate(schedule.rows)
        )
    )


def _sends(schedule: Schedule, edges: Edges, action: Action) -> list[Action]:
    """The sends right after `action`."""
    home = schedule.rank_of(action.stage)
    return [
        Action.send(action, stage)
        for stage in edges.readers(action)
        if schedule.rank_of(stage) != home
    ]


def _receives(row: Row, edges: Edges, streams: Iterable[list[Action]]) -> list[list[Action]]:
    """For each action of a rank's row the receives right before it; a stream holds sends in order."""
    positions = {action: i for i, action in enumerate(row)}
    before: list[list[Action]] = [[] for _ in row]
    for stream in streams:
        at = len(row)
        placed = []
        for send in reversed(stream):
            at = min(at, positions[edges.reader(send.made, send.peer)])
            placed.append((at, send.counterpart))
        for at, receive in reversed(placed):
            before[at].append(receive)
    return before


def with_reductions(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """`schedule` with a reduction `A` right after the last weight gradients of each stage.

    `stages` are those that need one, by default all; a stage with its own keeps it.
    """
    chosen = _lacking(schedule, "A", stages)
    return Schedule(tuple(_with_reductions(row, chosen) for row in schedule.rows))


def _lacking(schedule: Schedule, kind: str, stages: Collection[int] | None) -> set[int]:
    every = range(schedule.num_stages) if stages is None else stages
    return set(every) - {a.stage for row in schedule.rows for a in row if a.kind == kind}


def _with_reductions(row: Row, stages: set[int]) -> Row:
    ends = [(a.stage, i) for i, a in enumerate(row) if a.kind in WEIGHT_GRADIENTS]
    last = {stage: i for stage, i in ends if stage in stages}
    return tuple(
        b
        for i, a in enumerate(row)
        for b in ((a, Action("A", a.stage)) if last.get(a.stage) == i else (a,))
    )


def with_gathers(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """`schedule` with a gather `G` right before the first compute action of each stage.

    `stages` are those that need one, by default all; a stage with its own keeps it.
    """
    chosen = _lacking(schedule, "G", stages)
    return Schedule(tuple(_with_gathers(row, chosen) for row in schedule.rows))


def _with_gathers(row: Row, stages: set[int]) -> Row:
    starts = [(a.stage, i) for i, a in reversed(list(enumerate(row))) if a.computes]
    first = {stage: i for stage, i in starts if stage in stages}
    return tuple(
        b
        for i, a in enumerate(row)
        for b in ((Action("G", a.stage), a) if first.get(a.stage) == i else (a,))
    )
