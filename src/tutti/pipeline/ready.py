"""The graphs that ranks run: one, or with `micro` and `pipe` one for each pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import fx

from tutti.capture.captured import Captured
from tutti.errors import ScheduleError, ShardingError
from tutti.graph.analysis.liveness import peak_with_given
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.passes.pass_table import (
    left_out_by_environment,
    optimized,
    ready_to_split,
    refuse_unknown,
)
from tutti.passes.target import Target
from tutti.pipeline.micro_batches.moments import moments_of
from tutti.pipeline.micro_batches.sums_apart import sums_apart
from tutti.pipeline.schedule.schedule import Schedule
from tutti.pipeline.schedule.schedules import schedule
from tutti.pipeline.schedule.validate import validate
from tutti.pipeline.targets import target_here
from tutti.pipeline.timed import Timed, timed


def in_time(
    program: Program,
    *,
    cut_at: Sequence[str] = (),
    homes: Mapping[str, frozenset[int]] | None = None,
    without: Collection[str] | None = None,
    target: Target | None = None,
) -> Timed:
    """The programs of a layout with `micro` or `pipe`, one for each pipeline rank.

    Every rank computes the same ones.

    Args:
        program: of the layout.
        cut_at: names of modules at which stages begin.
        homes: the pipeline ranks that already keep state.
        without: passes to omit, as in `pass_table.optimized`.
        target: of the run, by default on this host alone; a memory budget counts its buffers.
    """
    rows = schedule_of(program.layout)
    names = cut_at if rows.num_stages > 1 else ()
    aimed = target if target is not None else target_here(program)
    left_out = _left_out(without)

    def split(graph: fx.Graph) -> Timed:
        return timed(program, graph, rows, cut_at=names, homes=homes)

    def peak(graph: fx.Graph) -> int:
        """The bytes of the pipeline rank that holds most."""
        finals = (optimized(one, aimed, without=left_out) for one in split(graph).programs)
        return max(peak_with_given(final, program.captured.mode) for final in finals)

    return split(ready_to_split(program, aimed, left_out, peak))


def refuse_coupled(program: Program) -> None:
    """Raise `ShardingError` if the step of a layout with `micro` couples the samples of a batch."""
    left_out = _left_out(None) | {"remat"}  # what the backward recomputes couples nothing
    target = Target(donated=frozenset(program.captured.updated))
    moments_of(ready_to_split(program, target, left_out), program.layout.micro, program.layout)


def for_time(captured: Captured, layout: Layout, made: Callable[[Captured], Program]) -> Program:
    """The program that `made` gives for a captured step under a layout.

    With `micro` numbers that the step adds to each value of a sum join the sum. Values for inspection are
    left out if they couple the samples of a batch.
    """
    if layout.micro > 1:
        captured = sums_apart(captured)
    program = made(captured)
    if layout.in_time and captured.inspects:
        try:
            refuse_coupled(program)
        except ShardingError:
            return made(captured.without_inspected())
    return program


def _left_out(without: Collection[str] | None) -> frozenset[str]:
    left_out = left_out_by_environment() if without is None else frozenset(without)
    refuse_unknown(left_out)
    return left_out


def schedule_of(layout: Layout) -> Schedule:
    """The rows of compute actions of the layout's schedule."""
    num_pipe_ranks = layout.axes.get("pipe", 1)
    if num_pipe_ranks == 1:
        return Schedule.parse(" ".join(f"0B{k}" for k in range(layout.micro)))
    if layout.schedule_file:
        return _from_file(layout, num_pipe_ranks)
    name, _, chunks = layout.schedule.rstrip(")").partition("(")
    default = 2 if name == "interleaved" else 1
    return schedule(
        name or "1f1b", num_pipe_ranks, layout.micro, int(chunks) if chunks else default
    )


def _from_file(layout: Layout, num_pipe_ranks: int) -> Schedule:
    """A user's own rows, checked before the start."""
    path = Path(layout.schedule_file)
    try:
        rows = Schedule.parse(path.read_text(), str(path))
    except OSError as error:
        raise ScheduleError(
            f"cannot read the schedule {path}",
            why=str(error),
            fix="the path from where the run starts",
        ) from None
    if rows.num_ranks != num_pipe_ranks or rows.num_micro != layout.micro:
        raise ScheduleError(
            f"the schedule is for {rows.num_ranks} ranks and {rows.num_micro} micro-batches",
            at=str(path),
            why=f'layout "{layout}" has pipe={num_pipe_ranks} micro={layout.micro}',
            fix=f"pipe={rows.num_ranks} micro={rows.num_micro}, or another schedule",
        )
    validate(rows)
    return rows
