"""Checks that a schedule has every compute action once, and each stage on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule

Position = tuple[int, int]


def position_text(schedule: Schedule, rank: int, position: int) -> str:
    """The position of an action, in words; counted from 1 in its row."""
    return f"rank {rank}, action {position + 1} of its row: {schedule.rows[rank][position]}"


def check_complete(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every stage does F, then I and W or B, once on every micro-batch.

    Also each stage must have one rank, and only a gather of weights may repeat.
    """
    seen = _check_once(schedule)
    _check_one_backward(schedule, seen)
    for stage in range(schedule.num_stages):
        rank = schedule.rank_of(stage)
        for micro in range(schedule.num_micro):
            for missing in _missing(stage, micro, seen):
                raise ScheduleError(
                    f"{missing} is missing",
                    at=f"rank {rank}, which plays stage {stage}",
                    why="a stage does F, and B or both I and W, once on every micro-batch; the "
                    f"schedule has {schedule.num_micro}",
                    fix=f"add {missing} to the row of rank {rank}",
                )


def _check_once(schedule: Schedule) -> dict[Action, Position]:
    """Every action with its rank and its position in the row."""
    seen: dict[Action, Position] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            home = schedule.rank_of(action.stage)
            if home != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on two ranks, {home} and {rank}",
                    at=position_text(schedule, rank, position),
                    why="the rank of a stage holds its weights",
                    fix=f"move {action} to the row of rank {home}",
                )
            if action in seen and action.kind != "G":
                raise ScheduleError(
                    f"{action} appears twice",
                    at=position_text(schedule, rank, position),
                    why=f"it was done already: {position_text(schedule, *seen[action])}",
                    fix="remove one of them",
                )
            seen[action] = rank, position
    return seen


def _check_one_backward(schedule: Schedule, seen: dict[Action, Position]) -> None:
    for action, position in seen.items():
        both = Action("B", action.stage, action.micro)
        if action.kind in ("I", "W") and both in seen:
            raise ScheduleError(
                f"{both} and {action} do the same work twice",
                at=position_text(schedule, *position),
                why="B is I and W in one",
                fix=f"remove {action}, or write I and W for {both}",
            )


def _missing(stage: int, micro: int, seen: dict[Action, Position]) -> Iterator[str]:
    def lacks(kind: str) -> bool:
        return Action(kind, stage, micro) not in seen

    if lacks("F"):
        yield f"{stage}F{micro}"
    if lacks("B"):
        if lacks("I") and lacks("W"):
            yield f"{stage}B{micro}"
        yield from (f"{stage}{kind}{micro}" for kind in "IW" if lacks(kind))
