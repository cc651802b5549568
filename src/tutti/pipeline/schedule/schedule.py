"""A schedule: the row of actions of every rank, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action

Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of a pipeline: one row per rank. Prints as text and parses back.

    >>> print(Schedule.parse('''
    ... 0F0 0F1     0B0     0B1     # rank 0
    ...     1F0 1B0 1F1 1B1         # rank 1
    ... '''))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

    It has no times: a rank starts its next action as soon as its inputs are ready.
    `pipeline.schedule.validate` checks that a schedule can be played.
    Raises `ScheduleError` without rows, or for an empty one.
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for rank, row in enumerate(self.rows):
            if not row:
                raise ScheduleError(
                    f"rank {rank} of the schedule has nothing to do", fix="fewer ranks"
                )
        if not self.rows:
            raise ScheduleError("a schedule has no rows", fix="one line of actions per rank")

    @classmethod
    def parse(cls, text: str, name: str = "schedule") -> Schedule:
        """Read one line per rank: actions with blanks between them; `#` begins a comment.

        It skips lines without an action. Raises `ScheduleError` with `name`, line and column (both from 1) of
        an invalid word.
        """
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            row = tuple(_words(line.partition("#")[0], name, number))
            if row:
                rows.append(row)
        if not rows:
            raise ScheduleError(
                f"{name} holds no action", at=name, fix="one line of actions per rank: 0F0 0B0"
            )
        return cls(tuple(rows))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages: one more than the highest stage."""
        return 1 + max(action.stage for row in self.rows for action in row)

    @cached_property
    def num_micro(self) -> int:
        """The number of micro-batches: one more than the highest one."""
        return 1 + max(action.micro for row in self.rows for action in row)

    @cached_property
    def _ranks(self) -> dict[int, int]:
        ranks: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                ranks.setdefault(action.stage, rank)
        return ranks

    def rank_of(self, stage: int) -> int:
        """The rank that plays `stage`. Raises `ScheduleError` for a stage without a rank."""
        if stage not in self._ranks:
            raise ScheduleError(
                f"no rank plays stage {stage}",
                why=f"the schedule has the stages {', '.join(map(str, sorted(self._ranks)))}",
                fix=f"add the actions of stage {stage} to a row",
            )
        return self._ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` plays, in order."""
        return tuple(sorted({action.stage for action in self.rows[rank]}))

    @property
    def has_transfers(self) -> bool:
        """Whether it has sends and receives."""
        return any(action.kind in ("S", "R") for row in self.rows for action in row)


def _words(line: str, name: str, number: int) -> Iterator[Action]:
    for found in re.finditer(r"\S+", line):
        try:
            yield Action.parse(found[0])
        except ScheduleError as error:
            at = f"{name}, line {number}, column {found.start() + 1}"
            raise ScheduleError(error.what, at=at, why=error.why, fix=error.fix) from None
