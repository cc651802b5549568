"""One program on all ranks of the layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from tutti.calls.first_call import first_call_undone, refuse_where_apart
from tutti.calls.guards import Guard, ReadGuard, guard_of, refuse_other_layouts
from tutti.calls.holders import Holders, missing
from tutti.calls.outside_state import Outside
from tutti.calls.running import Running
from tutti.calls.sharded_batch import shard_of, shardings_of
from tutti.calls.tables import are_same
from tutti.calls.weight_samples import Samples
from tutti.capture.captured import Captured, copied
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.findings import Findings
from tutti.capture.python.sizes import FreeSizes
from tutti.capture.state.first_form import awaiting, first_step_ahead, make_slots
from tutti.capture.state.lift import state_of
from tutti.capture.step import capture
from tutti.environment import STRICT
from tutti.errors import ShardingError
from tutti.execution.allocator import give_back_now
from tutti.execution.execute import Execution
from tutti.graph.ops.late_errors import errors_kept
from tutti.job import Job
from tutti.layout import Sharding
from tutti.modes.by_hand import refuse_as_evaluation
from tutti.modes.compiled_program import Compiled
from tutti.partition.partition import Program, partition
from tutti.pipeline.ready import for_time, in_time
from tutti.planner.placement.placement import found_seeds
from tutti.propagate.plan import plan
from tutti.replicas import replica_rows
from tutti.replicas.roster import Shapes
from tutti.report.explanation import explain as explain_program
from tutti.report.memory_course import memory_facts
from tutti.report.program_facts import program_facts
from tutti.state.agreeing import Agreeing, trained
from tutti.state.as_stored import lay_out_as_stored
from tutti.state.residence import (
    Residence,
    forget_values,
    own_memory,
    refuse_shared_memory,
    run_device,
    set_local,
    settle,
    whole_of,
)
from tutti.state.residences import adopt, refuse_open, residence_of
from tutti.state.shards import StateShard, unguarded
from tutti.state.taken import of_another_shape, take_over
from tutti.torch_private.dtensors import local_parts, spec_of
from tutti.torch_private.pytrees import tree_flatten, tree_unflatten
from tutti.user_lines import quoted, user_line
from tutti.verification.copies import copies_in_place
from tutti.verification.verdict import compare


class Plain:
    """Every rank plays its part of one program, and the ranks have the state."""

    served = None
    compare = staticmethod(compare)

    def __init__(self, job: Job, agreeing: Agreeing | None = None) -> None:
        self.job = job
        self.running = Running(job, agreeing)

    def before(self, batch: tuple[Any, ...]) -> None:
        """Nothing to do."""

    def begins(self, made: OnRanks) -> None:
        """Called before a program plays: nothing to do."""

    def after(self) -> None:
        """Nothing to do."""

    def signature(self, made: Any) -> Any:
        """`made`: nothing else tells programs apart."""
        return made

    def shards(self, tensors: Sequence[Tensor]) -> dict[int, Sharding]:
        """By position, the shardings of the tensors of a batch that arrive in shards of this program."""
        found = shardings_of(tensors, self.job.layout.mesh)
        own = set(self.job.layout.stage_mesh)
        return {i: sharding for i, sharding in found.items() if sharding.axes <= own}

    def rows(self, tensors: list[Tensor], shards: Collection[int]) -> list[Tensor]:
        """The program's rows of the tensors of a batch: this rank's shards, and the others whole."""
        return [shard_of(x) if i in shards else whole_of(x) for i, x in enumerate(tensors)]

    def stand_ins(self, tensors: list[Tensor], shards: Collection[int]) -> list[Tensor]:
        """The tensors for the capture, which reads no values: those in shards without values."""
        return [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if i in shards else whole_of(x)
            for i, x in enumerate(tensors)
        ]

    def refuse_first_step(self) -> None:
        """Raise the request for an eager call, if an optimizer's first step has another form."""
        if (one := awaiting(self.job.optimizer)) is not None:
            raise first_step_ahead(one)

    def compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], assumed: Assumed | None
    ) -> Compiled[Any]:
        """The program for a batch like this one; lays out the state for it."""
        job, running = self.job, self.running
        refuse_open(job.model)
        self.refuse_first_step()
        running.begin_together(batch)
        home = residence_of(job.model, job.layout)
        home.device = run_device(job.model)
        with unguarded():
            make_slots(job.optimizer)
        adopt(job.model, job.optimizer)
        try:
            program, holds = self._program(batch, home, (kind, given), assumed)
        except ShardingError as error:
            if not error.at.startswith("batch"):
                raise
            where = f"{quoted(user_line())}, {error.at}"
            raise ShardingError(error.what, at=where, why=error.why, fix=error.fix) from None
        refuse_as_evaluation(job, program.captured)
        refuse_shared_memory(program.captured.state, program.captured.updated)
        for name, sharding in program.storage.items():
            home.storage.setdefault(name, sharding)
        # Compares the ranks' programs, before any sharding.
        seed = replica_rows.seed_of(job.seed, home.replica)
        was_traced = not running.captures.is_resized  # else no Python value has changed
        execution = Execution(program, seed, home, cut=job.cut, gives_back=was_traced)
        lay_out_as_stored(job.model, job.optimizer, home)
        passing = program.captured.passing()
        settle(job.model, job.optimizer, home, run_device(job.model), job.seed, passing)
        if was_traced:
            running.python.walk()
        Outside(program.captured, running.python).agree(job.layout)
        running.python.note_changed(program.captured)
        reads = ReadGuard(program.captured) if program.captured.reads else None
        if reads is None:  # else another run may need the old state
            own = own_memory(state_of(job.model, job.optimizer))
            execution.donated = own & set(execution.program.captured.updated)
        forget_values(program.captured.state)  # the whole tensors would outlive their shards
        self.start(_trained_by(job, program.captured))
        samples = Samples.of_program(program, home.owners)
        return OnRanks(program, execution, holds, reads, mode=self, samples=samples)

    def start(self, trained: Shapes) -> None:
        """Called after the layout of the state for a program, with the weights that it trains."""

    def _program(
        self,
        batch: tuple[Any, ...],
        home: Residence,
        known: tuple[Any, Mapping[str, float]] | None = None,
        assumed: Assumed | None = None,
    ) -> tuple[Program, Guard]:
        """The partitioned program for a batch like this one, and the guard of its capture."""
        job, running = self.job, self.running
        leaves, form = tree_flatten(batch)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        shards = self.shards(tensors)
        named = {f"batch.{i}": sharding for i, sharding in shards.items()}
        given = iter(self.stand_ins(tensors, shards))
        batch = tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], form)
        renewed = {i: new for i, (old, new) in home.renewed.items() if old() is not None}

        def captured_with(
            free: FreeSizes | None, findings: Findings, assumed: Assumed | None
        ) -> Captured:
            return capture(
                *job.trained,
                batch,
                precision=job.layout.precision,
                findings=findings,
                renewed=renewed,
                free=free,
                assumed=assumed,
            )

        if known is None or assumed is not None:
            captured = captured_with(None, running.python.findings, assumed)
            running.captures.is_resized = False
        else:
            captured = running.captures.of(*known, batch, renewed, captured_with)
        refuse_other_layouts(captured, job.layout)
        home.forget_replaced(captured.state)
        dims = job.dims(batch)

        def program_of(captured: Captured) -> Program:
            shardings = {"known": home.compute, "dims": dims, "ready": job.found}
            seeds = found_seeds(captured, job.layout, job.place, **shardings)
            rest: dict[str, Any] = {"known": home.compute, "dims": dims, "shards": named, **seeds}
            made = plan(copied(captured), job.layout, job.place, **rest)
            home.compute.update(made.compute)
            return partition(made, strict=STRICT.read())

        return for_time(captured, job.layout, program_of), guard_of(captured)

    def program_of(self, batch: tuple[Any, ...]) -> Program:
        """The program for `batch`; copies take a first step of another form before."""
        job = self.job
        refuse_where_apart(job.optimizer, job.layout)
        if awaiting(job.optimizer) is None:
            return self._program(batch, Residence(job.layout))[0]
        with copies_in_place(*job.trained) as (step, model, optimizer):
            copy = type(self)(replace(job, train_step=step, model=model, optimizer=optimizer))
            with first_call_undone(*copy.job.trained, batch, job.seed, job.layout.precision):
                return copy._program(batch, Residence(job.layout))[0]

    def explain_call(self, batch: tuple[Any, ...], *, tensor: str | None, graph: bool) -> str:
        """The text for the program of `batch`."""
        program = self.program_of(batch)
        made = in_time(program, cut_at=self.job.cut) if program.layout.in_time else None
        return explain_program(program, tensor=tensor, graph=graph, made=made)

    def state_here(self) -> AbstractContextManager[None]:
        """The ranks have the state at any time."""
        return nullcontext()

    def state_replaced(self) -> AbstractContextManager[None]:
        """The ranks have the state at any time."""
        return nullcontext()

    def writes(self) -> bool:
        """All ranks do."""
        return True


@dataclass(eq=False)
class OnRanks(Compiled[Execution]):
    """A program of `Plain` on this rank, and the holders of its state.

    Args:
        mode: gives each call its rows of the batch.
        samples: of the state, compared between ranks.
        holders, outside: the holders of the state; None before the first call.
        lie, specs: a mask of the sharded state at the last call, and how its shards lay.
    """

    mode: Plain = field(kw_only=True)
    samples: Samples | None = field(default=None, kw_only=True)
    holders: Holders | None = field(default=None, kw_only=True)
    outside: Outside | None = field(default=None, kw_only=True)
    lie: list[bool] | None = field(default=None, kw_only=True)
    specs: list[Any] = field(default_factory=list, kw_only=True)

    @cached_property
    def updated(self) -> list[int]:
        """The index of each updated tensor in the state."""
        places = {entry.name: k for k, entry in enumerate(self.program.captured.state)}
        return [places[name] for name in self.execution.program.captured.updated]

    @cached_property
    def trained(self) -> Shapes:
        """The shapes of the parameters that the optimizers change, by name."""
        return _trained_by(self.mode.job, self.program.captured)

    @cached_property
    def changed(self) -> frozenset[str]:
        """The names of the state that the program changes."""
        return frozenset(self.program.captured.updated)

    @cached_property
    def shards(self) -> frozenset[int]:
        """The positions of the tensors of a batch that arrive in shards."""
        return frozenset(int(name.partition(".")[2]) for name in self.program.plan.shards)

    def play(
        self, given: Mapping[str, float], tensors: list[Tensor], *, checked: bool
    ) -> list[Any]:
        """Play a call; its new state replaces the old one, if the call counts."""
        state, running, execution = self._state(), self.mode.running, self.execution
        job = running.job
        self.mode.begins(self)
        own = self._here(state)
        inputs = [*own, *given.values(), *self.mode.rows(tensors, self.shards)]
        run = execution.run_checked if checked else execution.run
        late = nullcontext(()) if self.reads is None else errors_kept()
        with running.divergence.watching(self.number, self.samples, own), late as errors:
            returned, updates = run(inputs, running.num_steps)
        if moved := execution.moved():
            home, known = residence_of(job.model, job.layout), self.program.captured.state
            for at, new in moved.items():
                set_local(state[at], new)
                home.shared.note_tenant(known[at].name, state[at])
            own = self._here(state)  # frees the former tensors
            give_back_now()
        if checked:  # node by node, on the graph before passes: values, not memory
            returned = [x.clone() if isinstance(x, Tensor) else x for x in returned]
        if self.reads is not None:
            values = self.reads.values(returned)
            if not self.reads.holds(given, values):
                return returned
            if errors:
                raise errors[0]
        if checked:
            execution.refuse_what_came_in()
        # The program overwrites most in place.
        if not are_same(updates, [own[at] for at in self.updated]):
            both = zip(self.updated, updates, strict=True)
            # The new value of one may be the tensor of another.
            for at, new in [(at, new.detach()) for at, new in both if new is not own[at]]:
                set_local(state[at], new)
        # A returned state tensor is no parameter for its reader.
        return [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in returned]

    def _here(self, state: list[Tensor]) -> list[Tensor]:
        """This rank's parts of the state."""
        if self.lie is None or not any(self.lie):
            return [*state]
        return local_parts(state, self.lie)  # those outside are whole

    def _state(self) -> list[Tensor]:
        """The current state tensors, in the captured order."""
        job = self.mode.job
        now = self.holders.tensors() if self.holders is not None else None
        if now is None:
            captured = self.program.captured
            wanted = [x for x in captured.state if x.name not in captured.outside]
            self.outside = Outside(captured, self.mode.running.python)
            optimizers = self.mode.running.optimizers
            if any(s.kind == "slot" for s in missing(job.model, optimizers, wanted)):
                with unguarded():
                    make_slots(job.optimizer)  # the user has cleared them
                lay_out_as_stored(job.model, job.optimizer, residence_of(job.model, job.layout))
            self.holders = Holders(job.model, optimizers, wanted)
            now = self.holders.tensors()
            assert now is not None
            for entry, x in zip(wanted, now, strict=True):
                if x.shape != entry.tensor.shape:
                    raise of_another_shape(entry.name, x, entry.tensor.shape)
        if job.layout.num_ranks > 1:
            refuse_open(job.model)
            lie = list(map(is_, map(type, now), repeat(StateShard)))
            specs = list(map(spec_of, compress(now, lie)))
            if lie != self.lie or not are_same(specs, self.specs):
                state = self.program.captured.state[: len(now)]
                home = residence_of(job.model, job.layout)
                if take_over(job.model, job.optimizer, state, now) or lay_out_as_stored(
                    job.model, job.optimizer, home
                ):
                    return self._state()
                self.lie, self.specs = lie, specs
        assert self.outside is not None
        return [*now, *self.outside.tensors()] if self.outside else now

    def explain(self, *, tensor: str | None, graph: bool) -> str:
        """The sharding of every tensor, memory, every collective and its cause."""
        return explain_program(
            self.program,
            tensor=tensor,
            graph=graph,
            measured=self.measured,
            run=self.execution.graph,
            made=self.execution.timed,
        )

    def facts(self) -> dict[str, Any]:
        """The sharding of every tensor, memory, every collective and its cause, the schedule."""
        execution = self.execution
        made = program_facts(self.program, execution.timed, execution.graph)
        return made | {"memory": self.memory_facts()}

    def memory_facts(self) -> dict[str, Any]:
        """The predicted memory of this rank."""
        return memory_facts(self.program, self.execution.graph)


def _trained_by(job: Job, captured: Captured) -> Shapes:
    """The shapes of the parameters that the optimizers change, by name."""
    found = trained(job.model, job.optimizer, captured.updated)
    return {s.name: tuple(s.tensor.shape) for s in found}
