"""The estimate of a user's step under any layout.

A step whose programs are quickly written is estimated from the program of each layout itself. Otherwise
estimates are composed of pieces (`planner/depth`). A deep model is captured with few of its repeated layers.
A model whose layers do not repeat is captured whole, and the first layouts are estimated again from their
programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.capture.precision import DTYPES
from tutti.errors import LayoutError, ShardingError, TuttiError
from tutti.job import Job
from tutti.layout import Layout
from tutti.layout.budget import Budget
from tutti.pipeline.ready import refuse_coupled
from tutti.planner.depth.block_work import blocks_of
from tutti.planner.depth.composed import composed
from tutti.planner.depth.module_units import ModuleUnits
from tutti.planner.depth.repeated_layers import Run, ShortUnits, runs_of, shortened
from tutti.planner.depth.step_pieces import MODEL_AXES, Blocks
from tutti.planner.estimates.layout_estimate import (
    Estimate,
    dtype_of_nodes,
    estimate,
    flops_of_nodes,
)
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.estimates.wide_ops import WideOp, widest_op
from tutti.planner.placement.placement import AXES_FOUND
from tutti.planner.placement.reduced import mark_depth
from tutti.planner.search.ranking import (
    RankedLayout,
    Refinement,
    close_to_best,
    first_fitting,
    first_pipelines,
)
from tutti.planner.search.surely_too_large import LeastPeaks, finest_first
from tutti.planning.candidate_programs import CandidatePrograms, num_rows
from tutti.planning.side_by_side import (
    OtherProcess,
    Outcome,
    SharedGroups,
    divided,
    most_processes,
    num_processes,
    outcome_of,
)
from tutti.torch_private.pytrees import tree_flatten

# Nodes of all programs together that are written in some 20 seconds; and in two minutes, of models whose
# layers do not repeat, since no composed estimate is exact.
_MOST_NODES, _MOST_WHOLE_NODES = 40_000, 250_000
_SHORT = 2  # units of a run in a short model
_SEARCHED = frozenset(AXES_FOUND)


class StepEstimates:
    """Estimates of a job's step for calls with `batch`, on `machine(layout)`.

    Args:
        num_layouts: that will be estimated: many layouts of a deep model are composed.
        programs: of a job and a batch; another class may edit the programs of an estimate.
        capacity: bytes of a device; a layout that needs more is tried with the placement of least memory.
        every: estimate the layouts of a deep model that are surely too large, too.
    """

    def __init__(
        self,
        job: Job,
        batch: tuple[Any, ...],
        machine: Callable[[Layout], PricedMachine],
        *,
        num_layouts: int = 1,
        programs: Callable[..., CandidatePrograms] = CandidatePrograms,
        capacity: float = math.inf,
        every: bool = True,
    ) -> None:
        self.job, self.batch, self.machine = job, batch, machine
        self._made_of = programs
        self.rows = num_rows(batch)
        self._num_layouts, self._capacity = num_layouts, capacity
        self._blocks: dict[tuple[Layout, bool, tuple[int, ...]], Blocks] = {}
        self._units: dict[str, ShortUnits | ModuleUnits] = {}
        self._ahead: dict[Layout, Outcome] = {}
        self._marked: set[str] = set()  # precisions
        # Of a composed step, by precision, and whether there are micro-batches.
        self._refusals: dict[tuple[str, bool], TuttiError | None] = {}
        self._least = None if every else LeastPeaks(capacity)
        # Placements of least memory, of the layouts that need them.
        self.found: dict[Layout, dict[str, str]] = {}
        # Placements of the estimates of other processes.
        self._theirs: dict[Layout, Mapping[str, Any]] = {}
        self._on_processors = machine(job.layout).shares_memory
        self._programs = self._candidates()

    def __call__(self, layout: Layout) -> Estimate:
        """The estimate of one layout.

        Raises:
            ShardingError, LayoutError, ScheduleError: the step does not allow it.
            IdleAxisError: an axis of it splits nothing.
            SurelyTooLargeError: with smaller micro-batches it does not fit either.
        """
        bounds = self._least if self._is_composed and not _has_bytes(layout) else None
        if bounds is not None:
            bounds.refuse(layout)
        made, least_nbytes = self._fitting(layout)
        if bounds is not None:
            bounds.add(layout, least_nbytes)
        return made

    def _fitting(self, layout: Layout) -> tuple[Estimate, float]:
        """The estimate, with the placement of least memory if it fits with that alone; and the bytes that
        the layout needs at least under any placement."""
        made = self._estimate(layout, refined=False)
        ways = math.prod(layout.axes.get(a, 1) for a in _SEARCHED)
        if made.peak_nbytes <= self._capacity:
            return made, made.peak_nbytes
        if made.peak_nbytes > ways * self._capacity:
            return made, made.peak_nbytes / ways  # too much, even if all of it were split
        if (found := self._placing.smallest_place(layout)) is None:
            return made, made.peak_nbytes
        smaller = self._estimate(layout, refined=False, smallest=True)
        if smaller.peak_nbytes > self._capacity:
            return made, smaller.peak_nbytes
        self.found[layout] = found
        return smaller, smaller.peak_nbytes

    def of_many(
        self, layouts: Sequence[Layout]
    ) -> tuple[Iterable[Layout], Callable[[Layout], Estimate]]:
        """The layouts in the order in which to ask for their estimates, and the function to ask.

        Several processes share the work, unless the step runs on processors: kernels timed here would disturb
        each other.
        """
        composed = self._is_composed
        number = 1 if self._on_processors else num_processes(layouts, composed=composed)
        if composed and self._least is not None:
            layouts = finest_first(layouts)
        if number == 1:
            return layouts, self
        # Captures, once for all processes: an optimizer's first step of another form runs for real.
        captured = self._captured_short if composed else self._programs.captured
        for precision in dict.fromkeys(layout.precision for layout in layouts):
            with suppress(LayoutError):
                captured(precision)
        if composed:
            shared = SharedGroups(layouts)
            own, *parts = (shared.taken() for _ in range(min(number, len(shared.groups))))
        else:
            own, *parts = divided(layouts, number)
        before = set(self._blocks)

        def new_blocks() -> dict[Any, Blocks]:
            return {key: blocks for key, blocks in self._blocks.items() if key not in before}

        def outcome(layout: Layout) -> Outcome:
            return outcome_of(layout, self, self.found, self._near)

        others = [OtherProcess(part, outcome, new_blocks) for part in parts]
        theirs = dict.fromkeys(layouts)  # until this process takes them

        @cache
        def joined() -> Mapping[Layout, Outcome]:
            found: dict[Layout, Outcome] = {}
            for other in others:
                self._blocks |= other.pieces
                found |= other.outcomes
            return found

        def estimate(layout: Layout) -> Estimate:
            known = joined().get(layout) if layout in theirs else None
            if known is None:  # this process's part, or another one has failed
                return self(layout)
            if isinstance(known, Exception):
                raise known
            if known.smallest is not None:
                self.found[layout] = dict(known.smallest)
            self._theirs[known.estimate.layout] = known.near
            return known.estimate

        def in_order() -> Iterator[Layout]:
            for layout in own:
                theirs.pop(layout, None)
                yield layout
            yield from theirs

        return in_order(), estimate

    def refined(self, layout: Layout) -> Estimate:
        """The estimate with the placement that a run finds: of a deep model with the pipeline's schedule on
        a clock; of another one from its program, on processors with the times of kernels over all layouts.

        Raises:
            ShardingError, LayoutError, ScheduleError: the step does not allow it.
        """
        known = self._ahead.pop(layout, None)
        if known is None:
            return self._estimate(layout, refined=True, smallest=layout in self.found)
        if isinstance(known, Exception):
            raise known
        return known.estimate

    def paced(self, made: Estimate) -> Estimate:
        """The estimate at the machine's speed over all of them; asked for when each layout has its first."""
        pace = self.machine(made.layout).pace
        return made if pace is None else made.slower(pace())

    def _refine_ahead(self, layouts: Sequence[Layout]) -> None:
        """Refine layouts in several processes; each writes the programs of its part."""
        own, *parts = divided(layouts, most_processes())

        def outcome(layout: Layout) -> Outcome:
            return outcome_of(layout, self.refined, self.found, self._near)

        others = [OtherProcess(part, outcome) for part in parts]
        found = {layout: outcome(layout) for layout in own}
        for other in others:
            found |= other.outcomes
        self._ahead |= found

    def _estimate(self, layout: Layout, *, refined: bool, smallest: bool = False) -> Estimate:
        machine = self.machine(layout)
        if not self._is_composed or (self.composes_modules and (refined or _has_bytes(layout))):
            if refined and machine.settled is not None:
                machine = replace(machine, kernels=machine.settled)
            exact = refined and not smallest
            program = self._programs.program(layout, smallest=smallest, exact=exact)
            return estimate(program, machine, cut_at=self.job.cut)
        self._refuse_in_time(layout)
        exact = refined and not smallest and self._is_placed_otherwise(layout)
        blocks = self._blocks_of(layout, machine, smallest, exact=exact)
        return composed(blocks, layout, machine, played=refined)

    @property
    def refinement(self) -> Refinement | None:
        """Where `refined` says more: pipelines of a deep model, the first layouts of another one that is
        composed, kernels that were timed, and first layouts for which a run finds another placement."""
        if self.composes_modules:
            return Refinement(self.refined, first_fitting, self._refine_ahead)
        if self._on_processors and not self._is_composed:
            return Refinement(self.refined, close_to_best)
        return Refinement(self.refined, self._with_more_to_say)

    def _with_more_to_say(self, rows: Sequence[RankedLayout]) -> Iterable[RankedLayout]:
        pipelines = {row.layout for row in first_pipelines(rows)} if self._is_composed else set()
        for row in first_fitting(rows):
            if row.layout in pipelines or self._is_placed_otherwise(row.estimate.layout):
                yield row

    def _is_placed_otherwise(self, layout: Layout) -> bool:
        """Whether a run finds another placement than that of the first estimate."""
        if layout in self.found or not _is_searched(layout):
            return False
        return self._placing.placement(layout, exact=True) != self._near(layout)

    def _near(self, layout: Layout) -> Mapping[str, Any]:
        """The placement of a layout's first estimate, which it shares with layouts of the same axes."""
        if not _is_searched(layout):
            return {}
        known = self._theirs.get(layout)
        return self._placing.placement(layout) if known is None else known

    @property
    def _placing(self) -> CandidatePrograms:
        return self._short_programs if self._is_composed else self._programs

    @property
    def composes(self) -> str:
        """Of what estimates are composed: `layers` that repeat, `modules`, or "" of whole programs."""
        if not self._is_composed:
            return ""
        return "layers" if self.runs else "modules"

    @property
    def composes_modules(self) -> bool:
        """Whether estimates but the refined ones are composed, of a model whose layers do not repeat."""
        return self.composes == "modules"

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The repeated layers of the model."""
        return runs_of(self.job.model)

    @property
    def _repeats(self) -> dict[Run, int]:
        return dict.fromkeys(self.runs, _SHORT)

    @cached_property
    def _is_composed(self) -> bool:
        if not self.runs:
            return (
                not self._on_processors and self._num_nodes * self._num_layouts > _MOST_WHOLE_NODES
            )
        short = self._captured_short(self.job.layout.precision)
        return len(short.graph.nodes) * self._depth * self._num_layouts > _MOST_NODES

    @property
    def _num_nodes(self) -> int:
        """Of the whole step; 0 if its weights do not go with the precision, which each layout says."""
        try:
            return len(self._programs.captured(self.job.layout.precision).graph.nodes)
        except LayoutError:
            return 0

    @cached_property
    def _depth(self) -> float:
        """How many times as many layers the model has as its short form."""
        return sum(run.repeats for run in self.runs) / (_SHORT * len(self.runs))

    @cached_property
    def _short_programs(self) -> CandidatePrograms:
        return self._candidates() if self.runs else self._programs

    def blocks(self, layout: Layout) -> Blocks:
        """The pieces of a deep model under a layout.

        Raises:
            ShardingError, LayoutError: the step does not allow it.
        """
        return self._blocks_of(layout, self.machine(layout))

    def _candidates(self) -> CandidatePrograms:
        """A run on processors finds another placement than one on GPUs."""
        return self._made_of(
            self.job, self.batch, on_processors=self._on_processors, refuses_idle=True
        )

    def _blocks_of(
        self,
        layout: Layout,
        machine: PricedMachine,
        smallest: bool = False,
        *,
        exact: bool = False,
    ) -> Blocks:
        """The pieces under the layout's model axes and precision, for its rows of a micro-batch; `exact`
        with the placement that a run under just this layout finds."""
        rows = self.rows // (layout.axes.get("data", 1) * layout.micro)
        axes = {"data": self.rows // rows} | {
            a: n for a, n in layout.axes.items() if a in MODEL_AXES
        }
        short = Layout(
            axes={a: n for a, n in axes.items() if n > 1},
            precision=layout.precision,
        )
        known = short, smallest, (layout.zero, layout.micro) if exact else ()
        if known not in self._blocks:
            self._captured_short(layout.precision)
            given = {"placed": layout, "smallest": smallest, "exact": exact}
            program = self._short_programs.program(short, **given)
            self._blocks[known] = blocks_of(program, machine, self._units_in(layout.precision))
        return self._blocks[known]

    def _units_in(self, precision: str) -> ShortUnits | ModuleUnits:
        if self.runs:
            return ShortUnits(self.runs, self._repeats)
        if precision not in self._units:
            self._units[precision] = ModuleUnits(self._captured_short(precision).graph.nodes)
        return self._units[precision]

    def _refuse_in_time(self, layout: Layout) -> None:
        """Raise what the step raises under micro-batches, or in a pipeline: its pieces have neither."""
        if not layout.in_time:
            return
        key = layout.precision, layout.micro > 1
        if key not in self._refusals:
            self._refusals[key] = self._refusal(layout)
        if (found := self._refusals[key]) is not None:
            raise found

    def _refusal(self, layout: Layout) -> TuttiError | None:
        self._captured_short(layout.precision)
        alone = Layout(micro=layout.micro, precision=layout.precision)
        try:
            refuse_coupled(self._short_programs.program(alone))
        except (LayoutError, ShardingError) as error:
            return error
        return None

    def _captured_short(self, precision: str) -> Captured:
        with shortened(self.job.model, self.job.optimizer, self._repeats):
            captured = self._short_programs.captured(precision)
        if self.runs and precision not in self._marked:
            self._marked.add(precision)
            mark_depth(captured, ShortUnits(self.runs, self._repeats).stands_for)
        return captured

    def flops(self) -> float:
        """Of a step on the whole batch; see `flops_of_nodes`."""
        precision = self.job.layout.precision
        if not self._is_composed or not self.runs:
            return flops_of_nodes(self._programs.captured(precision).graph.nodes)
        graph = self._captured_short(precision).graph
        return flops_of_nodes(graph.nodes) + sum(self._more_flops(graph))

    def dtype_of(self, precision: str) -> torch.dtype:
        """In which most operations of the step compute: a step may cast its weights itself."""
        return dtype_of_nodes(self._nodes(precision))

    def wide_op(self, precision: str) -> WideOp | None:
        """The op with most operations that stays in a wider dtype than `precision`, if most operations do."""
        wanted, found = DTYPES[precision], self.dtype_of(precision)
        if wanted is None or wanted == found:
            return None
        return widest_op(self._nodes(precision), found)

    def _nodes(self, precision: str) -> Iterable[fx.Node]:
        """Of the step; of a deep model with few of its layers."""
        captured = self._captured_short if self._is_composed else self._programs.captured
        return captured(precision).graph.nodes

    def _more_flops(self, graph: Any) -> Iterator[float]:
        """Of the layers that the short model lacks, by run."""
        units = ShortUnits(self.runs, self._repeats)
        own: list[list[Any]] = [[] for _ in self.runs]
        for node in graph.nodes:
            unit = units.of(node.meta.get("module") or "")
            if unit is not None:
                own[unit[0]].append(node)
        for run, nodes in zip(self.runs, own, strict=True):
            yield flops_of_nodes(nodes) * (run.repeats - _SHORT) / _SHORT

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch whose first tensor holds integers of (samples, tokens); else 0."""
        tensors = [x for x in tree_flatten(self.batch)[0] if isinstance(x, Tensor)]
        first = tensors[0] if tensors else None
        if first is None or first.is_floating_point() or first.dim() < 2:
            return 0
        return first.shape[0] * first.shape[1]


def _is_searched(layout: Layout) -> bool:
    """Whether a run under the layout searches for a placement."""
    return max(layout.axes.get(a, 1) for a in AXES_FOUND) > 1


def _has_bytes(layout: Layout) -> bool:
    """Whether its `remat` is a budget in bytes, which no composed estimate knows."""
    budget = Budget.parse(layout.remat)
    return budget is not None and budget.nbytes is not None
