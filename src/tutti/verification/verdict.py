"""Proves that a partitioned step is the same step, or finds the difference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tutti.calls.first_call import first_call_undone
from tutti.calls.guards import refuse_other_layouts
from tutti.capture.captured import Captured, copied
from tutti.capture.handed import arguments_of
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.state.first_form import make_slots
from tutti.capture.state.left_modes import hooks_kept, modes_kept
from tutti.capture.step import capture
from tutti.graph.edits.promote import Promoted, promoted
from tutti.job import Job
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.passes.pass_table import left_out_by_environment, optimized, optional_names
from tutti.pipeline.ready import for_time, in_time
from tutti.pipeline.targets import target_here
from tutti.planner.placement.placement import found_seeds
from tutti.propagate.batch_dim import Dims
from tutti.propagate.plan import plan
from tutti.state.residence import Residence, run_device, settle
from tutti.verification.aligned_runs import AlignedCapture, AlignedPartition
from tutti.verification.blame import Difference, first_difference_of
from tutti.verification.comparisons import (
    PARTITION_TOLERANCE,
    CaptureComparison,
    Errors,
    PartitionComparison,
    Played,
    check_dtype,
    on_its_way,
)
from tutti.verification.copies import copies_in_place
from tutti.verification.observed import observed

# The name of the wrong pass for a program that was right until the split of its batch in time.
IN_TIME = "micro and pipe"


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    `max_error` is the largest relative difference between the partitioned program and one device in
    float64, `worst` its tensor; `capture_error` is that between the captured and the eager step in the
    model's own dtypes, relative to the steps' changes. `wrong_pass` names the pass that made a right
    program wrong; `first_difference` then is None.

    If replicas average after every step, `data_error` is the largest relative difference of the weights
    from those of one program on the whole batch; `ok` does not depend on it. With servers that apply each
    push alone, `staleness` is the most updates between a pull and its push.

    `rounding` is the difference of the two, in `worst_rounding`, if each makes updates of its own rounding;
    None if that makes no difference.
    """

    ok: bool
    layout: str
    steps: int
    num_tensors: int
    max_error: float
    worst: str
    capture_error: float
    worst_capture: str
    first_difference: Difference | None = None
    wrong_pass: str = ""
    data_error: float | None = None
    staleness: int | None = None
    rounding: float | None = None
    worst_rounding: str = ""

    def __str__(self) -> str:
        word = "ok: the same step" if self.ok else "NOT the same step"
        lines = [
            f'verify "{self.layout}": {word} ({self.num_tensors} tensors, {self.steps} steps)',
            f"  partition  {self.max_error:.1e} in float64, largest in {self.worst}"
            if self.max_error
            else "  partition  exact, in float64",
            f"  capture    {self.capture_error:.1e} of what the steps changed, "
            f"largest in {self.worst_capture}"
            if self.capture_error
            else "  capture    exact, in the model's own dtypes",
        ]
        if self.data_error is not None:
            same = self.data_error <= PARTITION_TOLERANCE
            lines.append(
                f"  data       {self.data_error:.1e} to one program on the whole batch: "
                + ("the same numbers" if same else "not the same, see docs/concepts/replicas.md")
            )
        if self.staleness is not None:
            lines.append(f"  order      at random; gradients up to {self.staleness} updates old")
        if self.rounding is not None:
            where = f"in {self.worst_rounding}: an update that is made of it"
            lines.append(f"  rounding   {self.rounding:.1e} apart {where}")
        if self.first_difference is not None:
            lines.append(f"  first      {self.first_difference}")
        if self.wrong_pass:
            lines.append(f"  pass       right before the pass {self.wrong_pass}, wrong after it")
        return "\n".join(lines)

    def __bool__(self) -> bool:
        return self.ok


def compare(job: Job, batch: tuple[Any, ...], *, steps: int, dtype: torch.dtype) -> Verdict:
    """Both comparisons for the layout of one job."""
    check_dtype(dtype)
    subject, layout = Subject.of(job, batch, steps), job.layout
    program = subject.program(layout, job.place, job.dims(batch))
    return subject.verdict(layout, job.place, program, cut=job.cut)


class Subject:
    """A step to be verified under any number of layouts: captured, and compared with eager, once.

    Layouts of another `precision` need another subject: they compute another step.

    It copies model and optimizer; the given ones stay unchanged.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        batch: tuple[Any, ...],
        *,
        steps: int = 2,
        seed: int = 0,
        precision: str = "fp32",
    ) -> None:
        self.steps, self.seed, self.precision = steps, seed, precision
        reached = train_step, model, optimizer, arguments_of(batch)
        with copies_in_place(*reached) as (step, own, optimizers):
            make_slots(optimizers)
            settle(own, optimizers, Residence(Layout()), run_device(own), seed)
            rest = batch, seed, precision
            with first_call_undone(step, own, optimizers, *rest):
                self._begin(step, own, optimizers, *rest)

    @classmethod
    def of(cls, job: Job, batch: tuple[Any, ...], steps: int) -> Subject:
        """The subject of a job, for its layout and others of the same `precision`."""
        options = {"seed": job.seed, "precision": job.layout.precision}
        return cls(*job.trained, batch, steps=steps, **options)

    def _begin(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        batch: tuple[Any, ...],
        seed: int,
        precision: str,
    ) -> None:
        """Capture the step, and compare it with the eager one."""
        steps = self.steps

        def on(assumed: Assumed) -> Captured:
            given = train_step, model, optimizer, batch
            with modes_kept(model), hooks_kept(model):
                return capture(*given, precision=precision, note_gradients=True, assumed=assumed)

        self.captured, self.start, self.feed = on_its_way(on, model, optimizer, batch, seed)
        self.capture = CaptureComparison(
            self.captured,
            train_step,
            model,
            optimizer,
            batch,
            self.start,
            self.feed,
            seed,
            precision=precision,
        )
        self.capture.run(steps)
        self.steps = self.capture.steps
        self.capture_errors = self.capture.errors
        if self.capture.is_alike and not self.capture_errors.worst <= self.capture.tolerance:
            closer = AlignedCapture(self.capture)
            closer.run()
            self.capture_errors = closer.errors
            self.capture_errors.apart = self.capture.errors

    def program(
        self, layout: Layout, place: Mapping[str, str] | None = None, dims: Dims | None = None
    ) -> Program:
        """The partitioned program under `layout`; `dims` are those of the samples, if given."""
        assert layout.precision == self.precision, f"captured in {self.precision}"
        refuse_other_layouts(self.captured, layout)

        def made(captured: Captured) -> Program:
            seeds = found_seeds(captured, layout, place or {}, dims=dims)
            return partition(plan(copied(captured), layout, place, dims=dims, **seeds))

        return for_time(self.captured, layout, made)

    def verdict(
        self,
        layout: Layout,
        place: Mapping[str, str] | None = None,
        program: Program | None = None,
        *,
        cut: Sequence[str] = (),
    ) -> Verdict:
        """The verdict for `layout`; `program` replaces the partitioned program (to inject faults).

        `cut` names the modules at which the stages of a pipeline begin, as for `tutti.distribute`.
        """
        program = program or self.program(layout, place)
        parts = self.errors(program, cut)
        same = parts.worst <= PARTITION_TOLERANCE
        captured = self.capture_errors
        first, wrong = None, ""
        if not same:
            wrong = self._wrong_pass(program, cut)
        if not same and not wrong:
            first = first_difference_of(program, self.start, self.feed, self.seed, self.steps)
        return Verdict(
            ok=same and captured.worst <= self.capture.tolerance,
            layout=str(layout) or "one device",
            steps=self.steps,
            num_tensors=parts.count,
            max_error=parts.worst,
            worst=parts.name,
            capture_error=captured.worst,
            worst_capture=captured.name,
            first_difference=first,
            wrong_pass=wrong,
            **rounding_of(parts, captured, same),
        )

    def errors(self, program: Program, cut: Sequence[str] = ()) -> Errors:
        """The errors of the executed `program` against one device, without a search for their cause."""
        parts = self._compared(program, lambda p: self.played(p, cut))
        if parts.apart is None:
            parts.take(self._gradients(program))
        return parts

    def played(
        self, program: Program, cut: Sequence[str] = (), without: Collection[str] | None = None
    ) -> Played:
        """The executed program, with all its passes but those in `without`."""
        if not program.layout.in_time:
            return Played.of(program, optimized(program, target_here(program), without=without))
        made = in_time(program, cut_at=cut, without=without)
        return Played(
            program.layout.stage_mesh,
            [optimized(one, target_here(one), without=without) for one in made.programs],
            [one.captured.updated for one in made.programs],
            made.owners,
        )

    def comparison(
        self,
        program: Program,
        play: Callable[[Program], Played],
        feed: dict[str, Any],
        seed: int,
        *,
        aligned: bool = False,
    ) -> PartitionComparison:
        """One device beside the result of `play` for the program; `aligned`: part by part."""
        captured, wide = self._wide
        if captured.inspects and not program.captured.inspects:
            captured, wide = self._wide_without_inspected
        if not aligned:
            rest = program, self.start, feed, seed
            return PartitionComparison(captured, *rest, played=play(program), wide=wide)
        seen = observed(program)
        rest = seen.program, self.start, feed, seed
        made = play(seen.program)
        return AlignedPartition(seen, captured, *rest, played=made, wide=wide)

    @cached_property
    def _wide(self) -> tuple[Captured, Promoted]:
        """The captured step, and its graph in float64, for every comparison."""
        return self.captured, promoted(self.captured.graph, self.captured.owner)

    @cached_property
    def _wide_without_inspected(self) -> tuple[Captured, Promoted]:
        """The same without the values for inspection."""
        captured = self.captured.without_inspected()
        return captured, promoted(captured.graph, captured.owner)

    def _compared(self, program: Program, play: Callable[[Program], Played]) -> Errors:
        """The errors of `play`'s result for the program: by a closer comparison, if there seem to be any."""
        given = program, play, self.feed, self.seed
        found = self.comparison(*given)
        found.run(self.steps)
        if not found.errors.worst <= PARTITION_TOLERANCE:
            plain, found = found, self.comparison(*given, aligned=True)
            found.run(self.steps)
            found.errors.apart = plain.errors
        return found.errors

    def _gradients(self, program: Program) -> Errors:
        """The errors of one step part by part: a small learning rate hides a wrong gradient."""
        found = self.comparison(
            program, lambda p: Played.of(p, p.graph), self.feed, self.seed, aligned=True
        )
        found.run(1)
        return found.errors

    def _wrong_pass(self, program: Program, cut: Sequence[str]) -> str:
        """The pass that makes a right program wrong; "" if none does."""
        every = optional_names()
        chosen = [name for name in every if name not in left_out_by_environment()]
        if program.layout.in_time:
            flat = self._compared(program, lambda p: Played.of(p, p.graph))
            if not flat.worst <= PARTITION_TOLERANCE:
                return ""
        for count in range(len(chosen) + 1):
            without = set(every) - set(chosen[:count])
            errors = self._compared(program, lambda p, left=without: self.played(p, cut, left))
            if not errors.worst <= PARTITION_TOLERANCE:
                return chosen[count - 1] if count else IN_TIME if program.layout.in_time else ""
        return ""


def rounding_of(parts: Errors, captured: Errors, same: bool) -> dict[str, Any]:
    """A verdict's fields about updates made of rounding."""
    apart = (parts.apart or captured.apart) if same else None
    return {} if apart is None else {"rounding": apart.worst, "worst_rounding": apart.name}
