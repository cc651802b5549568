"""The edges between stages: which stage reads the values of which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import COMPUTE, INPUT_GRADIENTS, Action
from tutti.pipeline.schedule.schedule import Schedule

Pairs = Iterable[tuple[int, int]]


class Edges:
    """The edges between the stages of a schedule, and the needs of each action that follow from them.

    `pairs` holds one pair of stages for each forward edge, (maker, reader); the gradient returns along
    the same pair. By default each stage feeds the next. Raises `ScheduleError` for a pair that
    leads backwards or to a stage that the schedule lacks.
    """

    def __init__(self, schedule: Schedule, pairs: Pairs | None = None) -> None:
        last = schedule.num_stages - 1
        self.pairs = sorted({(s, s + 1) for s in range(last)} if pairs is None else set(pairs))
        self._reads: defaultdict[int, list[int]] = defaultdict(list)
        self._feeds: defaultdict[int, list[int]] = defaultdict(list)
        for maker, reader in self.pairs:
            if not 0 <= maker < reader <= last:
                raise ScheduleError(
                    f"({maker}, {reader}) is no edge between stages",
                    why=f"a stage feeds a later one, and the last stage is {last}",
                    fix="pairs (maker, reader) with maker < reader",
                )
            self._reads[reader].append(maker)
            self._feeds[maker].append(reader)
        # A backward is one action or two: the kind that makes a stage's input gradients.
        self._backward = {
            (a.stage, a.micro): a for row in schedule.rows for a in row if a.kind in INPUT_GRADIENTS
        }

    def readers(self, action: Action) -> list[int]:
        """The stages that read the result of `action`."""
        if action.kind == "F":
            return self._feeds[action.stage]
        return self._reads[action.stage] if action.kind in INPUT_GRADIENTS else []

    def reader(self, made: Action, stage: int) -> Action:
        """The action of `stage` that reads the result of `made`."""
        if made.kind == "F":
            return Action("F", stage, made.micro)
        return self._backward[stage, made.micro]

    def inputs(self, action: Action) -> list[Action]:
        """The actions of other stages that must precede `action`."""
        stage, micro = action.stage, action.micro
        if action.kind == "F":
            return [Action("F", maker, micro) for maker in self._reads[stage]]
        if action.kind in INPUT_GRADIENTS:
            return [self._backward[reader, micro] for reader in self._feeds[stage]]
        return []

    def needs(self, action: Action) -> list[Action]:
        """All actions that must precede a compute action, of other stages and its own."""
        assert action.kind in COMPUTE, action
        own = {"F": "", "I": "F", "B": "F", "W": "I"}[action.kind]
        return self.inputs(action) + [Action(kind, action.stage, action.micro) for kind in own]
