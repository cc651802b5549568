"""The public functions and what they return: `distribute` -> `Step`, `verify` -> `Verdict`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tutti.calls.captures import Captures
from tutti.calls.divergence import Divergence
from tutti.calls.first_call import FirstCall, first_call_undone, refuse_where_apart
from tutti.calls.guards import MOST_WAYS, Guard, ReadGuard, guard_of, no_way, refuse_other_layouts
from tutti.calls.holders import Holders
from tutti.calls.numbers import Numbers
from tutti.calls.outside_state import Outside, refuse_where_served
from tutti.calls.processors import refuse_unlike
from tutti.calls.python_values import PythonValues
from tutti.calls.signature import Signatures
from tutti.calls.tables import are_same
from tutti.calls.weight_samples import Samples
from tutti.capture.batch import taken
from tutti.capture.python.python_state import Findings
from tutti.capture.python.read_values import Seen
from tutti.capture.python.sizes import FreeSizes
from tutti.capture.state.first_form import FirstStepAhead, awaiting, first_step_ahead, make_slots
from tutti.capture.state.lift import optimizers_of, state_of
from tutti.capture.step import Captured, capture, copied
from tutti.capture.substitutes.sparse import dense
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.payload import digest
from tutti.environment import CHECK_NAN, LAYOUT, MOST_PROGRAMS, STRICT
from tutti.errors import CommError, LayoutError, ShardingError
from tutti.execution.collector import rarely_collected
from tutti.execution.cuda_graph import op_by_op
from tutti.execution.execute import Execution
from tutti.execution.measure import peak_nbytes
from tutti.graph.quick import quickly_written
from tutti.job import Job
from tutti.launch.ranks import ensure_process_group
from tutti.launch.roles import SERVER
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.pipeline.timed import Timed
from tutti.propagate.batch_dim import BatchDim
from tutti.propagate.plan import plan
from tutti.replicas import replica_rows, strategies
from tutti.report.collective_records import Record, records
from tutti.report.explanation import explain as explain_program
from tutti.report.servers import explain_servers
from tutti.saving import step_checkpoint
from tutti.server.protocol import consistency
from tutti.serving.served import (
    Served,
    Worked,
    layout_of_evaluation,
    serve,
    state_here,
    state_replaced,
    writes,
)
from tutti.state.agreeing import Agreeing
from tutti.state.residence import (
    Residence,
    adopt,
    forget_values,
    own_memory,
    refresh,
    refuse_open,
    refuse_shared_memory,
    residence_of,
    run_device,
    set_local,
    settle,
    whole_of,
)
from tutti.state.shards import StateShard, unguarded
from tutti.state.taken import take_over
from tutti.state.whole import Whole, model_state
from tutti.user_lines import OnlyUsersFrames, quoted, user_line
from tutti.verification.copies import copies_in_place
from tutti.verification.verdict import Verdict, compare
from tutti.verification.verify_replicas import compare_replicas
from tutti.verification.verify_servers import compare_servers


def distribute(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    layout: str | Layout | None = None,
    *,
    place: Mapping[str, str] | None = None,
    cut: str | Sequence[str] = (),
    batch_dim: BatchDim = None,
    seed: int = 0,
) -> Step:
    """Play `train_step(model, optimizer, *batch)` on many ranks; the result is called with the batch.

    Args:
        train_step: an ordinary step for one device: forward, loss, backward, clipping, update. Without
            an optimizer it is called as `train_step(model, *batch)` (evaluation).
        model: left as it is. A module, also compiled or in `DataParallel`; or a dict, list or tuple of
            modules: `{"G": ..., "D": ...}`. Parameters that a rank keeps in part are `DTensor`s after the
            first call; `Step.whole` makes them whole for a block.
        optimizer: a `torch.optim.Optimizer`, a list, tuple or dict of them, or None.
        layout: such as `"data=2 tensor=2 zero=1"`; by default that of `tutti run --layout`, else data
            parallel over the ranks that there are.
        place: compute shardings by parameter-name pattern, one entry per dim:
            `{"*.q_proj.weight": "tensor, -"}`; a pattern of module names shards their outputs, as
            `tutti.shard_as` does. Axes that the layout lacks are ignored.
        cut: names of modules, or patterns, at which the stages of a pipeline begin, one for each stage
            but the first; chosen by predicted cost by default. Ignored without an axis `pipe`.
        batch_dim: the dim of the batch's tensors that holds the samples, for all of them or one entry for
            each argument of the step behind the optimizer (a sequence, or a mapping by name), None for one
            without samples; by default dim 0 of those with as many samples as the first, or of others
            where these split more of the step.
        seed: of dropout masks and the like, which do not depend on the layout; an integer of 64 bits, as
            `torch.manual_seed` takes it.

    Returns:
        A `Step`. Call it with the *global* batch: the same plain tensors on every rank.

    Raises:
        LayoutError: for a layout that cannot be read, or cannot work on these ranks.
        TuttiError: for a seed that is no integer of 64 bits.
        CaptureError, ShardingError: at the first call, for a step or a batch that does not fit, such as a
            batch without samples.
    """
    return Step(
        train_step,
        model,
        optimizer,
        layout_now(layout),
        place=place,
        cut=cut,
        batch_dim=batch_dim,
        seed=seed,
    )


def verify(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    batch: Sequence[Any] | Mapping[str, Any],
    layout: str | Layout,
    *,
    place: Mapping[str, str] | None = None,
    cut: str | Sequence[str] = (),
    batch_dim: BatchDim = None,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Verdict:
    """Show that the step under `layout` is the same step, on virtual ranks in this process.

    Two comparisons, over everything returned, every parameter, buffer and optimizer slot after `steps`
    steps: the captured graph against the eager step in the model's own dtypes, and the partitioned
    program against one device with every floating dtype promoted to `dtype`. Model and optimizer are
    left as they are. Replicas are compared with as many runs on one device, between which the strategy
    is played on whole weights. `batch` is what a call is given: a mapping for `step(**batch)`. `place`,
    `cut` and `batch_dim` are those of `distribute`.

    Returns:
        A `Verdict`: `.ok`, `.max_error`, `.capture_error`, `.first_difference`; prints as a report.
    """
    options: Any = {"place": place, "cut": cut, "batch_dim": batch_dim, "seed": seed}
    job = Job.of(train_step, model, optimizer, layout_now(layout), **options)
    given = taken(batch)
    agreeing = compare_servers if job.layout.server else compare_replicas
    comparing: Any = agreeing if job.layout.num_replicas > 1 else compare
    job.refuse_empty(given)
    refuse_where_apart(optimizer, job.layout)
    with rarely_collected(), quickly_written(), OnlyUsersFrames():
        return comparing(job, given, steps=steps, dtype=dtype)


# What a command that only looks at a script (verify, explain) does with a step instead of running it.
Look = Callable[["Step", tuple[Any, ...]], Any]
LOOK: ContextVar[Look | None] = ContextVar("look", default=None)


@dataclass
class _Compiled:
    program: Program
    execution: Execution | Worked
    holds: Guard = lambda _given: True
    reads: ReadGuard | None = None  # where the step reads values of tensors
    measured: int | None = None
    holders: Holders | None = None
    outside: Outside | None = None
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    lie: list[bool] | None = None  # which of the state lay in shards at the last call
    number: int = 0  # of the programs of its step, from 1
    last_call: int = 0
    samples: Samples | None = None

    def may_hold(self, given: Mapping[str, float], seen: Seen | None) -> bool:
        """Whether a run may go the ways of this program, by what another run has `seen` of tensors."""
        return seen is None or self.reads is None or self.reads.holds(given, seen)

    @cached_property
    def updated(self) -> list[int]:
        """Where each tensor that a step updates stands among the state."""
        places = {entry.name: k for k, entry in enumerate(self.program.captured.state)}
        return [places[name] for name in self.execution.program.captured.updated]


class Step:
    """A captured training step, called with the *global* batch.

    Made by `tutti.distribute`. The first call captures, partitions and compiles; a call with other
    shapes does so again and is cached.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        layout: Layout,
        *,
        place: Mapping[str, str] | None = None,
        cut: str | Sequence[str] = (),
        batch_dim: BatchDim = None,
        seed: int = 0,
    ) -> None:
        options: Any = {"place": place, "cut": cut, "batch_dim": batch_dim, "seed": seed}
        self.job = job = Job.of(train_step, model, optimizer, layout, **options)
        self.train_step, self.model, self.optimizer = job.trained
        self.layout, self.place, self.cut = job.layout, job.place, job.cut
        self.batch_dim, self.seed = job.batch_dim, job.seed
        self.num_steps = 0
        self._compiled: dict[Any, list[_Compiled]] = {}
        self._num_programs = self._num_traces = self._num_forgotten = 0
        self._most_programs = MOST_PROGRAMS.read()
        self.begun = False  # whether all ranks have made a call
        self._last: _Compiled | None = None
        self._optimizers = optimizers_of(optimizer)
        self._signatures = Signatures(self.model, self._optimizers)
        self._numbers = Numbers(optimizer)
        self.python = PythonValues(self.train_step, self.model, self._optimizers)
        self._captures = Captures(self.model, optimizer, self.python)
        self._divergence = Divergence(getattr(self.train_step, "__name__", "the step"), layout)
        # An evaluation agrees on nothing: each replica sees the whole batch with its own weights.
        replicas = layout.num_replicas > 1 and bool(self._optimizers)
        self.agreeing = Agreeing(layout) if replicas and not layout.server else None
        self.served = Served(self) if replicas and layout.server else None
        self._by_servers = bool(layout.server)
        if not self._optimizers:
            self.layout = layout_of_evaluation(layout)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One step on the global batch; returns what the training step returns, global values.

        With replicas: what this rank's replica returns for its rows of the batch.
        """
        batch = dense(taken(batch, named))
        look = LOOK.get()
        if look is not None:
            return look(self, batch)
        if self._by_servers:
            self._before_served(batch)
        leaves, form = _flattened(batch)
        found = self._found(leaves, form, batch)
        if found is None:
            return self._first_call(leaves, form, batch)
        compiled, given = found
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        checked = CHECK_NAN.read()
        execution = compiled.execution
        if isinstance(execution, Worked):
            assert self.served is not None
            whole = [whole_of(x) for x in tensors]
            with self._divergence.watching(compiled.number, None, ()):
                returned = self.served.worker.call(execution, given, whole, checked=checked)
        else:
            returned = self._run(compiled, execution, given, tensors, checked)
            if compiled.reads is not None:
                compiled, returned = self._on_its_way(
                    compiled, given, leaves, form, batch, returned
                )
        self._last = compiled
        compiled.last_call = self.num_steps
        captured = compiled.program.captured
        for one in self._optimizers:
            one._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it stepped
        self.num_steps += 1
        if self.agreeing is not None:
            self.agreeing.after(self)
        if captured.effects:
            self.python.apply(captured.effects, returned[captured.num_returned :])
        returned = returned[: captured.num_returned]
        self._warn_of_nan(returned)
        return tree_unflatten(returned, captured.returned)

    def _first_call(self, leaves: list[Any], form: Any, batch: tuple[Any, ...]) -> Any:
        """One step as PyTorch takes it, and a program for the next call like it."""
        self._begin_together(batch)
        call = FirstCall(self)
        with OnlyUsersFrames():
            returned, spec = call.take(batch)
        self.num_steps += 1
        self._warn_of_nan(returned)
        found = self._found(leaves, form, batch)
        if found is None:
            call.not_over()
        else:
            self._last = found[0]
            call.over()
        return tree_unflatten(returned, spec)

    def _found(
        self, leaves: list[Any], form: Any, batch: tuple[Any, ...]
    ) -> tuple[_Compiled, dict[str, float]] | None:
        """What `_find` gives; None for a call that is to be taken eagerly."""
        try:
            return self._find(leaves, form, batch)
        except FirstStepAhead:
            return None

    def _before_served(self, batch: tuple[Any, ...]) -> None:
        """A server serves at its first training step, and ends; an evaluation sees the weights of now."""
        if self.served is None:
            refresh(self.model)
        elif self.served.role.kind == SERVER:
            self.job.refuse_empty(batch)
            serve(self, self.served.role, tree_map_only(Tensor, whole_of, batch))
            raise SystemExit(0)

    def _run(
        self,
        compiled: _Compiled,
        execution: Execution,
        given: Mapping[str, float],
        tensors: list[Tensor],
        checked: bool,
    ) -> list[Any]:
        """One call of the program; the new state takes the place of the old one, if the call counts."""
        state = self._state(compiled)
        own: list[Any] = [*state]
        if compiled.lie is not None and any(compiled.lie):
            lie = chain(compiled.lie, repeat(False))  # those outside are whole
            both = zip(state, lie, strict=False)
            own = [t._local_tensor if lies else t for t, lies in both]  # type: ignore[attr-defined]
        inputs = [*own, *given.values(), *self._own_rows(tensors)]
        run = execution.run_checked if checked else execution.run
        with self._divergence.watching(compiled.number, compiled.samples, own):
            returned, updates = run(inputs, self.num_steps)
        if checked:  # node by node, as the graph is: values, not memory
            returned = [x.clone() if isinstance(x, Tensor) else x for x in returned]
        if compiled.reads is not None:
            values = compiled.reads.values(returned)
            if not compiled.reads.holds(given, values):
                return returned
        # Most are overwritten where they lie.
        if not are_same(updates, [own[at] for at in compiled.updated]):
            both = zip(compiled.updated, updates, strict=True)
            # What is new of one may be the tensor that held another.
            for at, new in [(at, new.detach()) for at, new in both if new is not own[at]]:
                set_local(state[at], new)
        # A state tensor that the step returns is no parameter to whoever reads it.
        return [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in returned]

    def _on_its_way(
        self,
        compiled: _Compiled,
        given: Mapping[str, float],
        leaves: list[Any],
        form: Any,
        batch: tuple[Any, ...],
        returned: list[Any],
    ) -> tuple[_Compiled, list[Any]]:
        """The program that goes the ways of this call, and what it returns: where the one that has run does
        not, by the values that the step reads from tensors, another one runs. Nothing of the first counts."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        checked = CHECK_NAN.read()
        values: Seen = {}
        for _ in range(MOST_WAYS):
            assert compiled.reads is not None
            values = compiled.reads.values(returned)
            if compiled.reads.holds(given, values):
                return compiled, returned
            compiled, given = self._find(leaves, form, batch, seen=values)
            assert isinstance(compiled.execution, Execution)
            returned = self._run(compiled, compiled.execution, given, tensors, checked)
            if compiled.reads is None:
                return compiled, returned
        raise no_way(compiled.program.captured, values)

    def _own_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """The batch's tensors whole, or this replica's rows of them."""
        whole = [whole_of(x) for x in tensors]
        return self.agreeing.rows(whole) if self.agreeing is not None else whole

    def _state(self, compiled: _Compiled) -> list[Tensor]:
        """The tensors that hold the state now, in the captured order."""
        now = compiled.holders.tensors() if compiled.holders is not None else None
        if now is None:
            captured = compiled.program.captured
            wanted = [x for x in captured.state if x.name not in captured.outside]
            compiled.outside = Outside(captured, self.python)
            if self.layout.num_ranks == 1:
                make_slots(self.optimizer)  # where the user has cleared them
            compiled.holders = Holders(self.model, self._optimizers, wanted)
            now = compiled.holders.tensors()
            assert now is not None
        if self.layout.num_ranks > 1:
            refuse_open(self.model)
            lie = list(map(is_, map(type, now), repeat(StateShard)))
            if lie != compiled.lie:
                state = compiled.program.captured.state[: len(now)]
                if take_over(self.model, self.optimizer, state, now):
                    return self._state(compiled)
                compiled.lie = lie
        assert compiled.outside is not None
        return [*now, *compiled.outside.tensors()] if compiled.outside else now

    def _find(
        self,
        leaves: list[Any],
        form: Any,
        batch: tuple[Any, ...],
        seen: Seen | None = None,
    ) -> tuple[_Compiled, dict[str, float]]:
        """What plays this call, and the numbers that it is given.

        `seen` is what the step has read from tensors in a run that went another way.
        """
        python, numbers = self.python.now()
        key = self._signature(leaves, form, python)
        given = self._numbers.of(leaves, numbers)
        self._divergence.given(leaves, given, self.num_steps)
        found = sorted(self._compiled.get(key, ()), key=lambda one: one is not self._last)
        for compiled in found:
            if compiled.holds(given) and compiled.may_hold(given, seen):
                for module, training in compiled.modes:
                    module.training = training
                return compiled, given
        modes = [(module, module.training) for module in self._signatures.modules]
        with rarely_collected(), quickly_written(), OnlyUsersFrames():
            made = self._compile(batch, self._kind(leaves, form, python), given, seen)
        made.modes = [(m, m.training) for m, before in modes if m.training != before]
        self._num_programs += 1
        made.number = self._num_programs
        # A step that calls `model.train()` or `eval()` is found again from either mode.
        for module, before in [(m, b) for m, b in modes if m.training != b]:
            module.training = before
        was_traced = not self._captures.is_resized  # else all of Python is as it was
        self._enter(made, leaves, form, walk=was_traced)
        for module, training in made.modes:
            module.training = training
        numbers = self._enter(made, leaves, form, walk=was_traced)
        if was_traced:
            self._warn_of_retraces()
        self._forget_programs(made)
        return made, self._numbers.of(leaves, numbers)

    def _enter(
        self, made: _Compiled, leaves: list[Any], form: Any, *, walk: bool
    ) -> dict[str, float]:
        """Let a call like this one find what was made for it; gives the numbers of now."""
        if walk:
            self.python.walk()
        python, numbers = self.python.now()
        self._captures.enter(self._kind(leaves, form, python))
        entered = self._compiled.setdefault(self._signature(leaves, form, python), [])
        if made not in entered:
            entered.append(made)
        return numbers

    def _forget_programs(self, made: _Compiled) -> None:
        """Keep no more than are asked for; all ranks make the same calls, and forget the same ones."""
        known = {id(one): one for found in self._compiled.values() for one in found}
        known.pop(id(made), None)
        while len(known) >= self._most_programs:
            oldest = min(known.values(), key=lambda one: one.last_call)
            del known[id(oldest)]
            for key, found in list(self._compiled.items()):
                self._compiled[key] = [one for one in found if one is not oldest]
                if not self._compiled[key]:
                    del self._compiled[key]
            self._note_forgotten()

    def _note_forgotten(self) -> None:
        self._num_forgotten += 1
        if self._num_forgotten == 1:
            warnings.warn(
                f"the step has more than {self._most_programs} programs, one for each batch of other sizes: "
                "the one that was not called for longest is dropped, and made again when it is needed; "
                f"{MOST_PROGRAMS.name} says how many are kept",
                stacklevel=5,
            )

    def _warn_of_retraces(self) -> None:
        """Something that changes at every call (a switch of a module) would trace for ever."""
        self._num_traces += 1
        count = self._num_traces
        if count in (8, 64):
            warnings.warn(
                f"the step has been traced {count} times: shapes, options of the optimizer or plain "
                "attributes of a module keep changing",
                stacklevel=4,
            )

    def _signature(self, leaves: list[Any], form: Any, python: int) -> Any:
        made = self._signatures.of(leaves, form, python)
        return (made, self.served.apart) if self.served is not None else made

    def _kind(self, leaves: list[Any], form: Any, python: int) -> Any:
        """What calls have in common that differ in nothing but sizes and inputs."""
        return self._signatures.of(leaves, form, python, sized=False)

    def _compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], seen: Seen | None
    ) -> _Compiled:
        if self.served is not None:
            self._begin_together(batch)
            worked = self.served.worker.compiled(tree_map_only(Tensor, whole_of, batch))
            refuse_where_served(worked.split.captured)
            return _Compiled(worked.program, worked, guard_of(worked.split.captured))
        refuse_open(self.model)
        if self.agreeing is not None:
            refuse_where_apart(self.optimizer, self.layout)
        elif (one := awaiting(self.optimizer)) is not None:
            raise first_step_ahead(one)
        self._begin_together(batch)
        home = residence_of(self.model, self.layout)
        home.device = run_device(self.model)
        with unguarded():
            make_slots(self.optimizer)
        adopt(self.model, self.optimizer)
        try:
            program, holds = self._program(batch, home, (kind, given), seen)
        except ShardingError as error:
            if not error.at.startswith("batch"):
                raise
            where = f"{quoted(user_line())}, {error.at}"
            raise ShardingError(error.what, at=where, why=error.why, fix=error.fix) from None
        refuse_shared_memory(program.captured.state, program.captured.updated)
        for name, sharding in program.storage.items():
            home.storage.setdefault(name, sharding)
        # Compares the ranks' programs, before anything is cut.
        seed = replica_rows.seed_of(self.seed, home.replica)
        was_traced = not self._captures.is_resized  # else all of Python is as it was
        execution = Execution(program, seed, home, cut=self.cut, gives_back=was_traced)
        settle(self.model, self.optimizer, home, run_device(self.model), self.seed)
        if was_traced:
            self.python.walk()
        Outside(program.captured, self.python).agree(self.layout)
        self.python.note_changed(program.captured)
        reads = ReadGuard(program.captured) if program.captured.reads else None
        if reads is None:  # else the old state may be needed once more
            own = own_memory(state_of(self.model, self.optimizer))
            execution.donated = own & set(execution.program.captured.updated)
        forget_values(program.captured.state)  # the whole tensors would outlive their shards
        if self.agreeing is not None and self.agreeing.team is None:
            self.agreeing.start(self)
        made = _Compiled(program, execution, holds, reads)
        made.samples = Samples.of_program(program, home.owners)
        return made

    def _program(
        self,
        batch: tuple[Any, ...],
        home: Residence,
        known: tuple[Any, Mapping[str, float]] | None = None,
        seen: Seen | None = None,
    ) -> tuple[Program, Guard]:
        """The partitioned program for a batch like this one, and the guard of its capture."""
        if self.agreeing is not None:
            batch = self.agreeing.batch(tree_map_only(Tensor, whole_of, batch))
        renewed = {i: new for i, (old, new) in home.renewed.items() if old() is not None}

        def captured_with(free: FreeSizes | None, findings: Findings) -> Captured:
            return capture(
                self.train_step,
                self.model,
                self.optimizer,
                batch,
                precision=self.layout.precision,
                findings=findings,
                renewed=renewed,
                free=free,
                seen=seen,
            )

        if known is None or seen is not None:
            captured = captured_with(None, self.python.findings)
            self._captures.is_resized = False
        else:
            captured = self._captures.of(*known, batch, renewed, captured_with)
        refuse_other_layouts(captured, self.layout)
        dims = self.job.dims(batch)
        guard, own = guard_of(captured), copied(captured)
        made = plan(own, self.layout, self.place, known=home.compute, dims=dims)
        home.compute.update(made.compute)
        return partition(made, strict=STRICT.read()), guard

    def program_of(self, batch: Sequence[Any]) -> Program:
        """The program that a call with `batch` would run, without running anything."""
        self.job.refuse_empty(taken(batch))
        if self.served is not None:
            return self.served.parts_of(taken(batch))[1]
        refuse_where_apart(self.optimizer, self.layout)
        given = self.train_step, self.model, self.optimizer
        if awaiting(self.optimizer) is None:
            return self._program(taken(batch), Residence(self.layout))[0]
        with copies_in_place(*given) as given:
            options: Any = {"cut": self.cut, "batch_dim": self.batch_dim, "seed": self.seed}
            made = Step(*given, self.layout, place=self.place, **options)
            with first_call_undone(*given, taken(batch), self.seed, self.layout.precision):
                return made._program(taken(batch), Residence(self.layout))[0]

    def _begin_together(self, batch: tuple[Any, ...]) -> None:
        """All ranks are at this call, which none has a program for, and were given the same."""
        several = ensure_process_group()
        if self.served is None:
            self.layout.check_ranks(dist.get_world_size() if several else 1)
        if self.begun:
            self._divergence.before_compiling()
        else:
            self._divergence.first()
            replicas = self.layout.num_replicas if not self.layout.server else 1
            refuse_unlike(replicas, run_device(self.model))
            self._check_same_batch(batch)
            self.begun = True
        self.job.refuse_empty(batch)

    def _check_same_batch(self, batch: tuple[Any, ...]) -> None:
        """All ranks must be given the same global batch, and say so before the first step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        entries = [f"seed={self.seed}"]
        for i, x in enumerate(tree_flatten(batch)[0]):
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                entries.append(f"batch tensor {i}: {list(x.shape)} {x.dtype} sha256 {digest(x)}")
        try:
            check_order(entries)
        except CommError as error:
            why = error.why or error.what
            if "seed=" in why:
                fix = "one `seed` for all: random numbers are those of one device"
                raise CommError("the ranks were given different seeds", why=why, fix=fix) from None
            raise CommError(
                "the ranks were given different batches",
                why=why,
                fix="give every rank the same *global* batch (one seed, no DistributedSampler): "
                "each rank takes its own part of it",
            ) from None

    def _warn_of_nan(self, returned: Sequence[Any]) -> None:
        for x in returned:
            scalar = isinstance(x, Tensor) and not x.dim() and x.is_floating_point()
            if scalar and x.is_cpu and not math.isfinite(x.item()):
                warnings.warn(
                    f"step {self.num_steps - 1} returned {x.item()}; run again with {CHECK_NAN}=1 to "
                    "stop at the first node that makes it",
                    stacklevel=3,
                )

    @property
    def program(self) -> Program:
        """The program of the last call."""
        if self._last is None:
            raise LayoutError("the step has not been called yet", fix="call it with a batch first")
        return self._last.program

    @property
    def graph(self) -> Any:
        """The partitioned `torch.fx` graph of the last call; with `micro` or `pipe`, that of this rank's
        place, in which all that runs once a micro-batch is one node `loop`."""
        made = self._timed
        return made.programs[self._place].graph if made else self.program.graph

    @property
    def collectives(self) -> list[Record]:
        """A record for every collective that this rank takes part in at a call like the last one.

        One that runs once a micro-batch is one record, with `times`. What places of a pipeline send each
        other is no collective: `explain` shows it.
        """
        return [r for r in records(self.program, self._timed) if r.place == self._place]

    @property
    def _timed(self) -> Timed | None:
        return self._last.execution.timed if self._last else None

    @property
    def _place(self) -> int:
        return self._last.execution.place if self._last else 0

    def explain(self, *, tensor: str | None = None, graph: bool = False) -> str:
        """Where every tensor lives, the predicted memory, every collective and why, as text.

        After `measure`, the measured memory stands beside the predicted one.
        """
        last = self._last
        measured, run = (last.measured, last.execution.graph) if last else (None, None)
        if last is not None and isinstance(last.execution, Worked):
            return explain_servers(
                last.execution.split,
                last.program,
                self.layout,
                graph=graph,
                measured=measured,
                run=run,
                timed=self._timed,
                apart=last.execution.apart,
            )
        return explain_program(
            self.program,
            tensor=tensor,
            graph=graph,
            measured=measured,
            run=run,
            made=self._timed,
        )

    def measure(self, *batch: Any, **named: Any) -> Any:
        """One step, as a call, that notes the most memory it takes (bytes above what was held before it).

        Call it after a first plain step: a first call captures. On a CPU it runs under PyTorch's profiler.
        """
        with op_by_op():
            nbytes, result = peak_nbytes(lambda: self(*batch, **named), run_device(self.model))
        if self._last is not None:
            self._last.measured = nbytes
        return result

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer slots and the step count, by name; shards are `DTensor`s.

        In a pipeline, the tensors that this rank keeps: those of other places are in their ranks' dicts.
        """
        with state_here(self.served):
            return step_checkpoint.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over tensors by name; whole ones are cut, `DTensor`s re-sharded as needed.

        In a pipeline `state` may leave out what other places keep. Raises `CheckpointError` for other names
        or shapes, before anything changes.
        """
        with state_replaced(self.served):
            step_checkpoint.load_state_dict(self, state)

    def whole(self, *, rank: int | None = None, slots: bool = False) -> Whole:
        """A block in which the model's weights are whole, ordinary tensors, to read or write.

            with step.whole():
                text = model.generate(prompt)

        As `tutti.whole(self.model)`: all ranks enter and leave together, and write the same values; or
        `rank` alone has them (`with step.whole(rank=0) as here:`). `step.whole().nbytes` is the memory that
        it takes. `slots` makes the optimizer's whole too.
        """
        return Whole(self.model, rank=rank, slots=slots)

    def model_state(self, *, rank: int | None = None) -> dict[str, Any]:
        """`model.state_dict()` as on one device, under every layout: whole plain tensors on the CPU.

        They are copies, one shard after the other gathered; tied weights share memory. All ranks call
        together; with `rank` that one alone gets them, and the others an empty dict.
        """
        return model_state(self.model, rank=rank)

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint directory, or the model alone where `path` ends in `.safetensors`."""
        with state_here(self.served):
            if writes(self.served):
                step_checkpoint.save(self, Path(path), extra)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read what `save` wrote, under any layout; returns its `extra`."""
        with state_replaced(self.served):
            return step_checkpoint.load(self, Path(path))


def layout_now(text: str | Layout | None) -> Layout:
    """The layout given, else the one of `tutti run --layout`, else data parallel over what there is."""
    if text is None:
        text = LAYOUT.read() or None
    if text is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        text = f"data={world_size}" if world_size > 1 else ""
    layout = Layout.parse(text)
    layout.check_available()
    if layout.server:
        consistency.parse(layout.sync)
    elif layout.sync:
        strategies.parse(layout.sync).check(layout.num_replicas)
    return layout


def _flattened(batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The leaves of a batch, and what it is made of beside them; most batches are a few tensors."""
    if all(type(x) is Tensor for x in batch):
        return list(batch), len(batch)
    return tree_flatten(batch)
