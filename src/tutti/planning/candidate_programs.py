"""The programs of one step under many layouts, from one capture for each precision.

A capture does not depend on the layout; propagation and partition do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutti.calls.first_call import first_call_undone
from tutti.calls.guards import refuse_other_layouts
from tutti.capture.batch import with_arguments
from tutti.capture.captured import Captured, copied
from tutti.capture.gpu_autocast import gpu_lists
from tutti.capture.python.findings import Findings
from tutti.capture.python.python_state import PythonState
from tutti.capture.state.first_form import awaiting, make_slots
from tutti.capture.state.left_modes import hooks_kept
from tutti.capture.state.lift import called_optimizers
from tutti.capture.step import capture
from tutti.errors import CaptureError, LayoutError
from tutti.execution.collector import rarely_collected
from tutti.graph.edits.quick import quickly_written
from tutti.job import Job
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.planner.placement.counted_programs import CountedPrograms
from tutti.planner.placement.placement import AXES_FOUND, found_seeds, programs_of
from tutti.propagate.batch_dim import Dims
from tutti.propagate.idle_axes import IdleAxisError
from tutti.propagate.plan import plan
from tutti.rules.book import Book
from tutti.torch_private.pytrees import tree_flatten, tree_unflatten
from tutti.user_lines import OnlyUsersFrames
from tutti.verification.copies import copies_in_place

# Axes on whose sizes a placement depends.
_PLACED = ("tensor", "seq", "expert")
# Programs to keep, for layouts that differ in `schedule` and `remat` only. A plan asks for these soon after
# each other.
_MOST_SHARED = 8


class CandidatePrograms:
    """Programs of `job`'s step for calls with `batch`; its own layout does not count.

    Nothing runs, but the first step of an optimizer whose first step has another form, on copies.

    Args:
        on_processors: of ranks without GPUs; by default those of the step as it is. With false, `bf16` is
            that of a GPU.
        refuses_idle: refuse a layout with an axis that splits nothing.
    """

    def __init__(
        self,
        job: Job,
        batch: tuple[Any, ...],
        *,
        on_processors: bool | None = None,
        refuses_idle: bool = False,
    ) -> None:
        self.job, self.batch, self.on_processors = job, batch, on_processors
        self.refuses_idle = refuses_idle
        self._idle: set[tuple[str, str, int]] = set()
        self._captured: dict[str, Captured | LayoutError] = {}
        self._books: dict[str, Book] = {}
        self._found: dict[Any, dict[str, Any]] = {}
        self._counted: dict[Any, CountedPrograms] = {}
        self._shared = lru_cache(_MOST_SHARED)(self._partitioned)

    def captured(self, precision: str) -> Captured:
        """The step as one graph.

        Raises:
            CaptureError: the step cannot be captured.
            LayoutError: the model's weights do not go with the precision.
        """
        if precision not in self._captured:
            self._captured[precision] = self._new(precision)
        made = self._captured[precision]
        if isinstance(made, LayoutError):
            raise made
        return made

    def _new(self, precision: str) -> Captured | LayoutError:
        lists = gpu_lists() if self.on_processors is False else nullcontext()
        with self._here(precision) as (step, model, optimizer), lists:
            try:
                return with_arguments(
                    lambda batch: capture(step, model, optimizer, batch, precision=precision),
                    step,
                    optimizer,
                    self.batch,
                )
            except LayoutError as error:
                return error

    def program(
        self,
        layout: Layout,
        *,
        placed: Layout | None = None,
        smallest: bool = False,
        exact: bool = False,
    ) -> Program:
        """The program of every rank under `layout`.

        Args:
            layout: of the program.
            placed: the layout whose placement it has; by default its own.
            smallest: with the placement of least memory.
            exact: with the placement of a run under the layout, else with that of one with such axes; see
                `_place`.

        Raises:
            ShardingError, LayoutError: the step does not allow the layout.
            IdleAxisError: an axis of it splits nothing, with `refuses_idle`.
        """
        for axis, size in layout.axes.items():
            if (layout.precision, axis, size) in self._idle:
                raise IdleAxisError(axis, size)
        refuse_layout(self.captured(layout.precision), layout)
        if placed is not None:  # the caller keeps the pieces of this program
            return self._partitioned(layout, placed, smallest, exact)
        alike = replace(layout, schedule="", remat="none")
        made = self._shared(alike, alike, smallest, exact)
        own = layout.with_micro(made.layout.micro)
        return replace(made, layout=own, plan=replace(made.plan, layout=own))

    def _partitioned(self, layout: Layout, placed: Layout, smallest: bool, exact: bool) -> Program:
        captured, dims = self.captured(layout.precision), self.job.dims(self.batch)
        with _quiet():
            found = self._place(captured, placed, dims, smallest, exact=exact)
            book = self._books.setdefault(layout.precision, Book()).for_copy()
            made = plan(copied(captured), layout, self.job.place, dims=dims, book=book, **found)
            if self.refuses_idle and made.idle:
                axis, size = made.idle[0], layout.axes[made.idle[0]]
                self._idle.add((layout.precision, axis, size))
                raise IdleAxisError(axis, size)
            return partition(made)

    def smallest_place(self, layout: Layout) -> dict[str, str] | None:
        """The placement of least memory; None if it is the one that a run finds."""
        captured, dims = self.captured(layout.precision), self.job.dims(self.batch)
        with _quiet():
            own, small = (self._place(captured, layout, dims, s) for s in (False, True))
        return None if own == small else dict(small["found"])

    def placement(self, layout: Layout, *, exact: bool = False) -> Mapping[str, Any]:
        """The arguments of `plan` that `program` takes for a layout's placement, in text."""
        captured, dims = self.captured(layout.precision), self.job.dims(self.batch)
        with _quiet():
            return self._place(captured, layout, dims, False, exact=exact)

    def _place(
        self,
        captured: Captured,
        layout: Layout,
        dims: Dims | None,
        smallest: bool,
        *,
        exact: bool = False,
    ) -> dict[str, Any]:
        """The placement that a run would find. Without `exact` layouts with the same axes of weights share
        that of the first of them: it depends little on the other words, and each search takes time."""
        axes = {a: n for a, n in layout.axes.items() if exact or a in _PLACED}
        words = (layout.zero, layout.micro) if exact else ()
        key = layout.precision, tuple(axes.items()), words, smallest
        if key not in self._found:
            self._found[key] = found_seeds(
                captured,
                layout,
                self.job.place,
                dims=dims,
                on_processors=self.on_processors,
                memory_nbytes=0.0 if smallest else None,
                programs=self._programs(captured, layout, dims),
            )
        return self._found[key]

    def _programs(
        self, captured: Captured, layout: Layout, dims: Dims | None
    ) -> CountedPrograms | None:
        """The programs that searches share for layouts with the same axes of weights; None without any."""
        sizes = tuple(layout.axes.get(a, 1) for a in AXES_FOUND)
        if max(sizes) == 1:
            return None
        key = layout.precision, sizes
        if key not in self._counted:
            self._counted[key] = programs_of(captured, layout, given=self.job.place, dims=dims)
        return self._counted[key]

    @contextmanager
    def _here(self, precision: str) -> Iterator[tuple[Any, Any, Any]]:
        job = self.job
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            if awaiting(job.optimizer) is None:
                make_slots(job.optimizer)
                findings = Findings()
                python = PythonState(
                    job.train_step, job.model, called_optimizers(job.optimizer), findings
                )
                stack.enter_context(python.restored())
                stack.enter_context(hooks_kept(job.model))
                yield job.trained
                return
            step, model, optimizer = stack.enter_context(copies_in_place(*job.trained))
            stack.enter_context(
                first_call_undone(step, model, optimizer, self.batch, job.seed, precision)
            )
            yield step, model, optimizer


def refuse_layout(captured: Captured, layout: Layout) -> None:
    """Raise `LayoutError` for a layout under which a run of the step raises `CaptureError`."""
    try:
        refuse_other_layouts(captured, layout)
    except CaptureError as error:
        raise LayoutError(error.what, at=error.at, why=error.why, fix=error.fix) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """A candidate's warnings are for the one that is chosen."""
    with warnings.catch_warnings(), rarely_collected(), quickly_written(), OnlyUsersFrames():
        warnings.simplefilter("ignore")
        yield


def with_rows(batch: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """`batch` with another number of samples: its tensors with as many rows as the first have `rows` without
    values."""
    leaves, form = tree_flatten(batch)
    own = num_rows(batch)

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != own:
            return x
        return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)

    return tree_unflatten([resized(x) for x in leaves], form)


def num_rows(batch: tuple[Any, ...]) -> int:
    """The number of samples of a batch: the rows of its first tensor with dims; 1 without one."""
    tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim()]
    return tensors[0].shape[0] if tensors else 1
