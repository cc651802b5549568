"""A program with a batch split in time: the graph of each pipeline rank.

    %w  = input                    %w  = input
    %x  = shard(%b, micro)         %l  = loop(body, [%w, %b])     body: x = shard(b, micro) ... g
    ...                       ->   %g  = item(%l, 0)
    %s  = all_reduce(%g, micro)    %w' = adamw(%w, %g)
    %w' = adamw(%w, %s)

The graph keeps the inputs and outputs of the program; passes treat the loop as one op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from tutti.graph.analysis.state import is_state
from tutti.graph.edits.edit import source_of
from tutti.graph.ops.loop import Body, Do
from tutti.partition.partition import Program
from tutti.pipeline.micro_batches.moments import Moments, moments_of
from tutti.pipeline.ranks.owners import owners_of, stages_of_homes
from tutti.pipeline.ranks.pipe_rank_graph import PipeRankGraph, output_of, sum_of
from tutti.pipeline.ranks.pipe_ranks import PipelinePlan, plan_pipe_ranks
from tutti.pipeline.ranks.schedule_rows import completed, in_halves, rows_of
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.stages.convolution_halves import convolutions_in_halves
from tutti.pipeline.stages.cut import Stages, cut
from tutti.pipeline.stages.stage_parts import Parts, fake_of, parts_of
from tutti.pipeline.stages.tied import add_apart


@dataclass
class Timed:
    """The program of each pipeline rank, and the owners of state.

    programs: by pipeline rank; each returns the new values of the state kept there. owners: the pipeline
    ranks that keep each state tensor. schedule: the rows of actions, without sends and receives.
    """

    programs: list[Program]
    stages: Stages
    owners: dict[str, frozenset[int]]
    schedule: Schedule
    bodies: list[Body] = field(default_factory=list)


def timed(
    program: Program,
    graph: fx.Graph,
    schedule: Schedule,
    *,
    cut_at: Sequence[str] = (),
    homes: Mapping[str, frozenset[int]] | None = None,
) -> Timed:
    """Lower `graph`, the flat graph of `program`; changes `graph`.

    Args:
        schedule: compute actions only, one row per pipeline rank.
        cut_at: names of modules at which stages begin.
        homes: the pipeline ranks that already keep state.

    Raises:
        ShardingError: the step couples the samples of a batch.
        LayoutError: the step does not allow this cut.
    """
    halves = any(a.kind in "IW" for row in schedule.rows for a in row)
    if halves:
        convolutions_in_halves(graph)
    moments = moments_of(graph, program.layout.micro, program.layout)
    mesh = program.layout.mesh
    pipe_rank_of = [schedule.rank_of(s) for s in range(schedule.num_stages)]
    known = stages_of_homes(homes or {}, pipe_rank_of)
    stages = cut(moments, schedule.num_stages, names=cut_at, homes=known, mesh=mesh)
    while sum(add_apart(moments, stages, total) for total in list(moments.sums)):
        pass
    parts = parts_of(moments, stages, halves=halves)
    schedule = completed(in_halves(schedule) if halves else schedule, parts)
    owners = owners_of(program, parts, pipe_rank_of, homes or {})
    return _TimedProgramWriter(program, moments, stages, parts, owners, schedule).write()


class _TimedProgramWriter:
    def __init__(
        self,
        program: Program,
        moments: Moments,
        stages: Stages,
        parts: Parts,
        owners: dict[str, frozenset[int]],
        schedule: Schedule,
    ) -> None:
        self.program, self.moments, self.stages = program, moments, stages
        self.parts, self.owners, self.schedule = parts, owners, schedule
        self.num_pipe_ranks = len(schedule.rows)
        self.pipe_ranks = range(self.num_pipe_ranks)

    def write(self) -> Timed:
        rows = rows_of(self.schedule, self.parts)
        self.bodies = [self._body(p, rows[p]) for p in self.pipe_ranks]
        self.given = [self._given(p) for p in self.pipe_ranks]
        made_at = {
            x: self.schedule.rank_of(stage) for stage, xs in self.parts.results.items() for x in xs
        }
        plan = plan_pipe_ranks(
            self.moments, self.num_pipe_ranks, self.owners, made_at, self.given, self._results()
        )
        programs = [self._program(plan, p) for p in self.pipe_ranks]
        return Timed(programs, self.stages, self.owners, self.schedule, self.bodies)

    def _program(self, plan: PipelinePlan, pipe_rank: int) -> Program:
        captured = self.program.captured
        graph = PipeRankGraph(
            self.moments,
            plan,
            pipe_rank,
            updated=captured.updated,
            owners=self.owners,
            body=self.bodies[pipe_rank],
            given=self.given[pipe_rank],
            made=self._made(pipe_rank),
        ).write()
        mine = [name for name in captured.updated if pipe_rank in self.owners[name]]
        return replace(self.program, graph=graph, captured=replace(captured, updated=mine))

    def _mine(self, pipe_rank: int) -> list[tuple[int, str]]:
        return [k for k in self.parts.parts if self.schedule.rank_of(k[0]) == pipe_rank]

    def _given(self, pipe_rank: int) -> list[fx.Node]:
        mine = self._mine(pipe_rank)
        return list(dict.fromkeys(x for k in mine for x in self.parts.given[k]))

    def _made(self, pipe_rank: int) -> list[fx.Node]:
        """The results of the loop of a pipeline rank."""
        stages = self.parts.results.items()
        return [x for stage, xs in stages if self.schedule.rank_of(stage) == pipe_rank for x in xs]

    def _body(self, pipe_rank: int, row: list[Do]) -> Body:
        mine = self._mine(pipe_rank)
        for key in mine:
            self._forget_others_state(pipe_rank, self.parts.parts[key].graph)
        stages = {s for s, _ in mine}
        messages = {k: v for k, v in self.parts.messages.items() if {k[0], k[2]} & stages}
        totals = {t.name: t for t in self.moments.sums}
        names = [n for k in mine for n in self.parts.parts[k].summed]
        return Body(
            num_micro=self.program.layout.micro,
            parts={k: self.parts.parts[k] for k in mine},
            row=tuple(row),
            given=tuple(x.name for x in self._given(pipe_rank)),
            sums=tuple(sum_of(totals[n]) for n in names),
            results=tuple(x.name for x in self._made(pipe_rank)),
            messages={k: tuple(x.name for x in v) for k, v in messages.items()},
            vals={x.name: fake_of(x) for v in messages.values() for x in v},
            sources={x.name: source_of(x) for v in messages.values() for x in v},
        )

    def _forget_others_state(self, pipe_rank: int, graph: fx.Graph) -> None:
        """Treat state that another pipeline rank keeps as a plain value here."""
        for node in filter(is_state, graph.nodes):
            if pipe_rank not in self.owners.get(node.meta["name"], {pipe_rank}):
                node.meta = {k: v for k, v in node.meta.items() if k != "kind"}

    def _results(self) -> list[tuple[fx.Node, frozenset[int]]]:
        returned, updates = output_of(self.moments.graph)
        found = [(x, frozenset(self.pipe_ranks)) for x in returned if isinstance(x, fx.Node)]
        named = zip(updates, self.program.captured.updated, strict=True)
        return found + [(x, self.owners[name]) for x, name in named]
