"""The simulator: the times of a schedule's actions, idle time, and memory.

    start of an action  =  the later of   the end of the one before it in its row
                                          the arrival of the value that it receives
    start of a transfer =  the later of   the end of the action that made the value
                                          the end of the transfer before it in its stream

A stream leads from one rank to another, keeps its order, and takes no time in either rank's row.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.edges import Pairs
from tutti.pipeline.schedule.live import peak_held
from tutti.pipeline.schedule.progress import playing_order
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.validate import Report, validate

# Seconds by kind (str), by (stage, kind), or by `Action`; keys may be mixed, and no mapping type allows
# that together with a plain dict[str, float].
Costs = Mapping[Any, float]


class Span(NamedTuple):
    """An action with its start and end, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    schedule: the schedule with its transfers.
    rows: per rank the spans of its compute actions, gathers and reductions, in order.
    transfers: the spans of all sends; a span ends at the arrival of the value.
    seconds: from the first start to the last end.
    idle_seconds: per rank, the part of `seconds` without work.
    message_seconds: per rank, the part of `idle_seconds` due to messages on their way, to the rank or to
        those that it waits for.
    peak_live: per rank, the most micro-batches held, over its stages.
    peak_nbytes: per rank, the most bytes held for them; 0 without `nbytes`.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...]
    seconds: float
    idle_seconds: tuple[float, ...]
    message_seconds: tuple[float, ...]
    peak_live: tuple[int, ...]
    peak_nbytes: tuple[int, ...]

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time without work, 0 to 1."""
        total = self.seconds * len(self.rows)
        return math.fsum(self.idle_seconds) / total if total else 0.0

    def slower(self, factor: float) -> Timeline:
        """The same with all costs `factor` times as long."""

        def later(spans: tuple[Span, ...]) -> tuple[Span, ...]:
            return tuple(Span(s.action, factor * s.start, factor * s.end) for s in spans)

        return replace(
            self,
            rows=tuple(map(later, self.rows)),
            transfers=later(self.transfers),
            seconds=factor * self.seconds,
            idle_seconds=tuple(factor * x for x in self.idle_seconds),
            message_seconds=tuple(factor * x for x in self.message_seconds),
        )

    def shared_seconds(self, ranks_per_processor: float) -> float:
        """The seconds if the ranks share processors equally, a pipeline rank for each of `rows`.

        A moment in which k of n rows work takes `k / n * ranks_per_processor` as long, at least once: a rank
        that waits leaves its processor to others.
        """
        if ranks_per_processor <= 1:
            return self.seconds
        spans = [span for row in self.rows for span in row]
        changes = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
        total, now, working = 0.0, 0.0, 0
        for at, change in [*changes, (self.seconds, 0)]:
            total += (at - now) * max(1.0, working / len(self.rows) * ranks_per_processor)
            now, working = at, working + change
        return total


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    transfer_seconds: float | Mapping[tuple[int, int], float] = 0.0,
    edges: Pairs | None = None,
    nbytes: Mapping[int, int] | None = None,
    freed_nbytes: Mapping[int, int] | None = None,
) -> Timeline:
    """Play `schedule` on a clock.

    Args:
        schedule: a schedule valid for `pipeline.schedule.validate`, with or without transfers.
        costs: seconds by kind (`{"F": 1.0, "I": 1.0, "W": 1.0}`), by (stage, kind) or by `Action`; the
            most exact one counts. `B` is I + W by default, gathers and reductions are 0.
        transfer_seconds: of a value from rank to rank, for all, or by (maker, reader) stages.
        edges: pairs (maker, reader) of stages; by default each stage feeds the next.
        nbytes: the bytes that each stage keeps of a micro-batch from F to W.
        freed_nbytes: the part of them that I frees already; negative if it keeps more for W than it frees.

    Raises:
        ScheduleError: the schedule cannot be played, or a cost is missing, negative or not finite.
    """
    report, order = _prepared(schedule, tuple(edges) if edges is not None else None)
    clock = _Clock(report.schedule, costs, transfer_seconds)
    for rank, action in order:
        clock.play(rank, action)
    kept, freed = nbytes or {}, freed_nbytes or {}
    seconds = clock.end()
    return Timeline(
        schedule=report.schedule,
        rows=tuple(map(tuple, clock.rows)),
        transfers=tuple(clock.transfers),
        seconds=seconds,
        idle_seconds=tuple(
            seconds - math.fsum(s.end - s.start for s in spans) for spans in clock.rows
        ),
        message_seconds=tuple(math.fsum(b - a for a, b in waits) for waits in clock.on_its_way),
        peak_live=report.peak_live,
        peak_nbytes=tuple(
            peak_held(row, lambda s: kept.get(s, 0), lambda s: freed.get(s, 0))
            for row in report.schedule.rows
        ),
    )


@lru_cache(maxsize=64)
def _prepared(
    schedule: Schedule, edges: tuple[tuple[int, int], ...] | None
) -> tuple[Report, tuple[tuple[int, Action], ...]]:
    """The valid schedule with its transfers, and an order in which its actions can be played; a plan plays
    one schedule with many costs."""
    report = validate(schedule, edges)
    return report, tuple(playing_order(report.schedule))


class _Clock:
    """The time of every rank and of every stream."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        transfer_seconds: float | Mapping[tuple[int, int], float],
    ) -> None:
        self.schedule, self.costs, self.transfer_seconds = schedule, costs, transfer_seconds
        self.now = [0.0] * schedule.num_ranks
        self.rows: list[list[Span]] = [[] for _ in schedule.rows]
        self.transfers: list[Span] = []
        self.sent: dict[Action, float] = {}
        self.arrival: dict[Action, float] = {}
        # By rank, in order and apart: when it waits because a message is on its way.
        self.on_its_way: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]
        self.free: defaultdict[tuple[int, int], float] = defaultdict(float)

    def play(self, rank: int, action: Action) -> None:
        if action.kind == "S":
            stream = rank, self.schedule.rank_of(action.peer)
            self.sent[action] = self.now[rank]
            start = max(self.now[rank], self.free[stream])
            end = self.free[stream] = self.arrival[action] = start + self._moving(action)
            self.transfers.append(Span(action, start, end))
        elif action.kind == "R":
            begin, end = self.now[rank], self.arrival[action.counterpart]
            if end > begin:
                made = max(begin, self.sent[action.counterpart])
                self._wait(rank, self.schedule.rank_of(action.peer), begin, made)
                if end > made:
                    self.on_its_way[rank].append((made, end))
                self.now[rank] = end
        else:
            end = self.now[rank] + self._seconds(action)
            self.rows[rank].append(Span(action, self.now[rank], end))
            self.now[rank] = end

    def end(self) -> float:
        """When all ranks have ended; the others wait for the last."""
        last = max(range(len(self.now)), key=lambda rank: self.now[rank])
        for rank, now in enumerate(self.now):
            self._wait(rank, last, now, self.now[last])
        return self.now[last]

    def _wait(self, rank: int, other: int, begin: float, end: float) -> None:
        """`rank` waits for what `other` does, who may wait for a message itself."""
        theirs = self.on_its_way[other]
        for start, stop in theirs[max(0, bisect(theirs, (begin,)) - 1) :]:
            if start >= end:
                break
            if stop > begin:
                self.on_its_way[rank].append((max(start, begin), min(stop, end)))

    def _moving(self, send: Action) -> float:
        if not isinstance(self.transfer_seconds, Mapping):
            return _checked(self.transfer_seconds, "a transfer")
        edge = min(send.stage, send.peer), max(send.stage, send.peer)
        if edge not in self.transfer_seconds:
            raise ScheduleError(f"transfer_seconds lacks the edge {edge}", at=str(send))
        return _checked(self.transfer_seconds[edge], f"a transfer along {edge}")

    def _seconds(self, action: Action) -> float:
        stage, kind = action.stage, action.kind
        for key in (action, (stage, kind), kind):
            if key in self.costs:
                return _checked(self.costs[key], str(action))
        if kind == "B":
            parts = (Action(part, stage, action.micro) for part in "IW")
            return sum(self._seconds(part) for part in parts)
        if kind in ("G", "A"):
            return 0.0
        raise ScheduleError(
            f"costs lack the seconds of {kind}",
            at=str(action),
            fix=f'costs with "{kind}", or ({stage}, "{kind}") for this stage alone',
        )


def _checked(seconds: float, what: str) -> float:
    if not 0 <= seconds < math.inf:
        raise ScheduleError(f"{what} cannot take {seconds} seconds", fix="0 or more")
    return seconds
