"""The validator: proves that a schedule can be played, and counts its live micro-batches.

1. every action once, each stage on one rank (`complete.py`)
2. every action after those that it needs: in its own row, or after a receive
3. sends and receives matched, each stream in order
4. all ranks reach their end (`progress.py`)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import WEIGHT_GRADIENTS, Action
from tutti.pipeline.schedule.complete import Position, check_complete, position_text
from tutti.pipeline.schedule.edges import Edges, Pairs
from tutti.pipeline.schedule.live import peak_held
from tutti.pipeline.schedule.progress import playing_order
from tutti.pipeline.schedule.schedule import Row, Schedule
from tutti.pipeline.schedule.transfers import with_transfers


@dataclass(frozen=True)
class Report:
    """The validator's report on a valid schedule.

    schedule: the schedule with its transfers.
    peak_live: per rank, the most micro-batches that wait for their weight gradients, over its stages.
    peak_live_of_stage: the same for each stage alone.
    """

    schedule: Schedule
    peak_live: tuple[int, ...]
    peak_live_of_stage: tuple[int, ...]


def validate(
    schedule: Schedule, edges: Pairs | None = None, *, blocking_sends: bool = False
) -> Report:
    """Check that `schedule` can be played: every action once, after its inputs, without a deadlock.

    Between two ranks, in one direction, one stream keeps its order. A send is posted and its rank
    continues; a receive waits. A schedule without transfers gets them from `with_transfers`.

    Args:
        schedule: compute actions, with or without transfers, gathers and reductions.
        edges: pairs (maker, reader) of stages; by default each stage feeds the next.
        blocking_sends: a send, too, waits for its receive, as with streams without a buffer.

    Raises:
        ScheduleError: names the action, its position, the reason and a fix.
    """
    check_complete(schedule)
    found = Edges(schedule, edges)
    for rank in range(schedule.num_ranks):
        _check_order_on_rank(schedule, rank, found)
    if schedule.has_transfers:
        _check_transfers(schedule, found)
        _check_received(schedule, found)
        _check_streams(schedule)
    else:
        schedule = with_transfers(schedule, found.pairs)
    for _ in playing_order(schedule, blocking_sends=blocking_sends):
        pass
    stages = [
        tuple(a for a in schedule.rows[schedule.rank_of(stage)] if a.stage == stage)
        for stage in range(schedule.num_stages)
    ]
    return Report(
        schedule,
        peak_live=tuple(peak_held(row, lambda stage: 1) for row in schedule.rows),
        peak_live_of_stage=tuple(peak_held(row, lambda stage: 1) for row in stages),
    )


def _check_order_on_rank(schedule: Schedule, rank: int, edges: Edges) -> None:
    """Check that each action of a row follows those of the row that it needs."""
    row = schedule.rows[rank]
    # Later gathers may repeat: the first one counts.
    positions = {action: i for i, action in reversed(list(enumerate(row)))}
    for i, action in enumerate(row):
        for need in _needs(action, row, edges):
            if positions.get(need, -1) > i:
                raise ScheduleError(
                    f"{action} stands before {need}",
                    at=position_text(schedule, rank, i),
                    why=f"{action} needs what {need} makes",
                    fix=f"move {need} before {action} in the row of rank {rank}",
                )


def _needs(action: Action, row: Row, edges: Edges) -> list[Action]:
    """The actions that must precede `action`, if the same rank has them."""
    if action.computes:
        return [*edges.needs(action), Action("G", action.stage)]
    if action.kind == "S":
        return [action.made]
    if action.kind == "A":
        return [a for a in row if a.stage == action.stage and a.kind in WEIGHT_GRADIENTS]
    return []


def _check_transfers(schedule: Schedule, edges: Edges) -> None:
    """Check that exactly the necessary values move between ranks, once each."""
    computed = [a for row in schedule.rows for a in row if a.computes]
    due = {
        Action.send(made, stage)
        for made in computed
        for stage in edges.readers(made)
        if schedule.rank_of(stage) != schedule.rank_of(made.stage)
    }
    present = {
        a: (rank, i)
        for rank, row in enumerate(schedule.rows)
        for i, a in enumerate(row)
        if a.kind in ("S", "R")
    }
    for action, position in present.items():
        if (action if action.kind == "S" else action.counterpart) not in due:
            raise _not_due(schedule, action, position_text(schedule, *position))
    for send in sorted(due, key=str):
        for action in (send, send.counterpart):
            if action not in present:
                raise _missing(schedule, action, present.get(action.counterpart))


def _not_due(schedule: Schedule, action: Action, at: str) -> ScheduleError:
    maker, reader = sorted((action.stage, action.peer))
    if schedule.rank_of(maker) == schedule.rank_of(reader):
        why = f"stages {maker} and {reader} are both on rank {schedule.rank_of(maker)}"
    else:
        why = (
            f"the edges between stages hold no ({maker}, {reader}), or nothing makes {action.made}"
        )
    return ScheduleError(
        f"{action} moves what nobody reads",
        at=at,
        why=why,
        fix=f"remove {action}, or add ({maker}, {reader}) to the edges",
    )


def _missing(schedule: Schedule, action: Action, other: Position | None) -> ScheduleError:
    rank = schedule.rank_of(action.stage)
    what = "send" if action.kind == "S" else "receive"
    return ScheduleError(
        f"the {what} {action} is missing",
        at=f"rank {rank}, which plays stage {action.stage}",
        why=f"its other end is there: {position_text(schedule, *other)}"
        if other
        else f"{action.made} is read on another rank",
        fix=f"add {action} to the row of rank {rank}",
    )


def _check_received(schedule: Schedule, edges: Edges) -> None:
    """Check that each value of another rank is received before its reader."""
    for rank, row in enumerate(schedule.rows):
        positions = {action: i for i, action in enumerate(row)}
        for i, action in enumerate(row):
            for need in edges.inputs(action):
                receive = Action.receive(need, action.stage)
                if schedule.rank_of(need.stage) != rank and positions[receive] > i:
                    raise ScheduleError(
                        f"{action} stands before {receive}",
                        at=position_text(schedule, rank, i),
                        why=f"{action} needs what {need} makes on rank {schedule.rank_of(need.stage)}",
                        fix=f"move {receive} before {action} in the row of rank {rank}",
                    )


def _check_streams(schedule: Schedule) -> None:
    """Check that values between two ranks, in one direction, are received in the order of their sends."""
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.kind == "S":
                sent[rank, schedule.rank_of(action.peer)].append(action)
            elif action.kind == "R":
                received[schedule.rank_of(action.peer), rank].append(action)
    for (source, target), sends in sent.items():
        for send, receive in zip_longest(sends, received[source, target]):
            if send.counterpart != receive:
                position = schedule.rows[target].index(receive)
                raise ScheduleError(
                    f"{receive} is out of order",
                    at=position_text(schedule, target, position),
                    why=f"the next value that rank {source} sends to rank {target} is {send}",
                    fix=f"receive {send.counterpart} before {receive}, or send {receive.counterpart} first",
                )
