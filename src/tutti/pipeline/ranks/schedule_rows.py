"""The rows of loops: those of a schedule, with the actual messages."""

from __future__ import annotations

from tutti.graph.ops.loop import GATHER, RECEIVE, REDUCE, SEND, Do
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.transfers import with_gathers, with_reductions, with_transfers
from tutti.pipeline.stages.stage_parts import Parts


def in_halves(schedule: Schedule) -> Schedule:
    """The schedule with each backward as two actions; a file may mix whole and split backwards."""
    return Schedule(
        tuple(
            tuple(
                Action(kind, a.stage, a.micro)
                for a in row
                for kind in ("IW" if a.kind == "B" else a.kind)
            )
            for row in schedule.rows
        )
    )


def completed(schedule: Schedule, parts: Parts) -> Schedule:
    """The schedule with the actual gathers and reductions; its own ones keep their positions."""
    having = {kind: {s for s, k in parts.parts if k == kind} for kind in (GATHER, REDUCE)}
    rows = ([a for a in row if a.stage in having.get(a.kind, (a.stage,))] for row in schedule.rows)
    schedule = Schedule(tuple(map(tuple, rows)))
    return with_reductions(with_gathers(schedule, having[GATHER]), having[REDUCE])


def rows_of(schedule: Schedule, parts: Parts) -> list[list[Do]]:
    """The schedule's rows with the actual messages."""
    if schedule.num_stages == 1:
        return [[Do("B", a.stage, a.micro) for a in row] for row in schedule.rows]
    edges = sorted({(min(a, b), max(a, b)) for a, _, b in parts.messages})
    rows = []
    for row in with_transfers(schedule, edges).rows:
        made = [_do(a) for a in row]
        rows.append([d for d in made if not d.way or _message(d) in parts.messages])
    return rows


def _message(do: Do) -> tuple[int, str, int]:
    if do.way == SEND:
        return do.stage, do.kind, do.other
    return do.other, do.kind, do.stage


def _do(action: Action) -> Do:
    if action.kind == "S":
        return Do(action.moved, action.stage, action.micro, SEND, action.peer)
    if action.kind == "R":
        return Do(action.moved, action.stage, action.micro, RECEIVE, action.peer)
    return Do(action.kind, action.stage, action.micro)
