"""The predicted time of the stages of a pipeline, and the messages between pipeline ranks.

    seconds of a part      =  sum over its nodes      `costs/step_prices.py`
    seconds of a message   =  by its bytes

Only their ratios count: they show whether stages are balanced, and whether a cut pays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from tutti.costs.step_prices import StepPrices
from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.pipeline.schedule.action import COMPUTE
from tutti.pipeline.timed import Timed
from tutti.planner.simulator import Timeline, simulate


@dataclass(frozen=True)
class Stage:
    """One stage: its pipeline rank, its modules, and the seconds of its parts for one micro-batch.

    Parts `G` and `A`, if any, count per step. A module split over several stages appears as "part of" it.
    `source` is the line that begins the stage.
    """

    number: int
    pipe_rank: int
    modules: tuple[str, ...]
    seconds_of: dict[str, float]
    source: str

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return sum(x for kind, x in self.seconds_of.items() if kind in COMPUTE)


@dataclass(frozen=True)
class Message:
    """A message between two pipeline ranks, `times` a step: its values, its bytes each time, and its line.

    edge: the sending and the receiving stage; within a loop. pipe_ranks: theirs. kind: the action of the
    sending stage that made it, `F`, `B` or `I`; "" outside of the loop.
    """

    kind: str
    edge: tuple[int, int] | None
    pipe_ranks: tuple[int, int]
    num_values: int
    nbytes: int
    times: int
    source: str


@dataclass(frozen=True)
class Forecast:
    """The stages and messages of a step, and its timeline, by `prices`."""

    made: Timed
    stages: tuple[Stage, ...]
    messages: tuple[Message, ...]
    prices: StepPrices

    @cached_property
    def timeline(self) -> Timeline | None:
        """The schedule played with these seconds; None without stages."""
        schedule = self.made.schedule
        if schedule.num_stages == 1:
            return None
        costs = {(s.number, kind): x for s in self.stages for kind, x in s.seconds_of.items()}
        keys = {key for body in self.made.bodies for key in body.messages}
        transfers = {(min(a, b), max(a, b)): 0.0 for a, _, b in keys}
        for one in self.messages:
            if one.edge is not None:
                edge = min(one.edge), max(one.edge)
                transfers[edge] = max(transfers[edge], self.prices.message(one.nbytes))
        return simulate(schedule, costs, transfer_seconds=transfers, edges=sorted(transfers))

    def dear_cuts(self) -> Iterator[str]:
        """A sentence for each cut whose messages, per micro-batch, take longer than it saves.

        A cut saves at most the shorter of its two stages: without it, one rank would run both.
        """
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            over = [
                m for m in self.messages if m.edge and min(m.edge) < after.number <= max(m.edge)
            ]
            nbytes = sum(m.nbytes for m in over)
            seconds = self.prices.message(nbytes)
            saved = min(before.seconds, after.seconds)
            if seconds > saved:
                yield (
                    f"the cut before stage {after.number} ({os.path.basename(after.source)}) moves "
                    f"{nbytes} bytes a micro-batch, predicted {seconds:.2g} s, to save {saved:.2g} s of "
                    "computing: fewer stages would be faster, or another cut="
                )


def forecast(made: Timed) -> Forecast:
    """The forecast of a program split in time."""
    values = [list(body.vals.values()) for body in made.bodies]
    prices = StepPrices.of(values, made.programs[0].layout.mesh)
    stages = tuple(_stage(made, s, prices) for s in range(made.schedule.num_stages))
    return Forecast(made, stages, tuple(_messages(made)), prices)


def _stage(made: Timed, number: int, prices: StepPrices) -> Stage:
    pipe_rank = made.schedule.rank_of(number)
    parts = made.bodies[pipe_rank].parts
    seconds = {
        kind: sum(prices.seconds(part.graph).values())
        for (stage, kind), part in parts.items()
        if stage == number
    }
    nodes = [n for n in made.stages.stage if _is(made, n, number)]
    source = next(filter(None, map(source_of, nodes)), "")
    return Stage(number, pipe_rank, tuple(_modules(made, number)), seconds, source)


def _is(made: Timed, node: fx.Node, number: int) -> bool:
    return node in made.stages.forward and made.stages.stage[node] == number


def _modules(made: Timed, number: int) -> Iterator[str]:
    """The outermost modules inside of a stage, in order; and those with a part in it."""
    stages: dict[str, set[int]] = {}
    for node, stage in made.stages.stage.items():
        if node in made.stages.forward:
            for name in _prefixes(node):
                stages.setdefault(name, set()).add(stage)
    named: dict[str, None] = {}
    for node in made.stages.stage:
        if _is(made, node, number) and (names := _prefixes(node)):
            alone = next((n for n in names if stages[n] == {number}), None)
            named[alone or f"part of {names[-1]}"] = None
    yield from named


def _prefixes(node: fx.Node) -> list[str]:
    """The modules around a node, from the outermost: `a`, `a.b`, `a.b.c`."""
    words = (node.meta.get("module") or "").split(".")
    return [".".join(words[: i + 1]) for i in range(len(words))] if words[0] else []


def _messages(made: Timed) -> Iterator[Message]:
    pipe_rank_of = made.schedule.rank_of
    seen = {key: body for body in made.bodies for key in body.messages}
    for (stage, kind, other), body in sorted(seen.items(), key=lambda entry: entry[0]):
        pipe_ranks = pipe_rank_of(stage), pipe_rank_of(other)
        if pipe_ranks[0] != pipe_ranks[1]:
            names = body.messages[stage, kind, other]
            nbytes = sum(body.vals[n].nbytes for n in names)
            line = body.source_of(stage, kind, other)
            edge = stage, other
            yield Message(kind, edge, pipe_ranks, len(names), nbytes, body.num_micro, line)
    for program in made.programs:
        for node in program.graph.nodes:
            if node.target is collectives.send:
                xs, source, to = node.args
                nbytes = sum(map(nbytes_of, xs))
                yield Message("", None, (source, to), len(xs), nbytes, 1, source_of(node))
