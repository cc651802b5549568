"""A worker of a run with servers: pull, forward and backward, push."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from tutti.capture.lift import create_slots, optimizers_of, state_of
from tutti.errors import ServerError
from tutti.graph import random
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.replicas import parts
from tutti.runtime import roles
from tutti.runtime.allocator import give_back_now, keep_freed_memory
from tutti.runtime.checked import Checked
from tutti.runtime.generate import generate
from tutti.runtime.loops import Loops
from tutti.runtime.residence import (
    forget_values,
    local_of,
    own_memory,
    residence_of,
    set_local,
)
from tutti.runtime.roles import Role
from tutti.runtime.server_side import captured_for, whole_state
from tutti.server import consistency
from tutti.server.client import Client, Rows
from tutti.server.program import in_slices, played, worker_layout, worker_program
from tutti.server.small_sums import SmallSums
from tutti.server.split import Split, split
from tutti.server.update import WEIGHT
from tutti.server.updater import GraphUpdater, check_same
from tutti.server.worker import WorkerPart, alone, together

# Set to anything, an op without a rule is an error instead of a warning.
STRICT = "TUTTI_STRICT"


class Holder(Protocol):
    """What holds the state: a `tutti.Step`."""

    train_step: Any
    model: nn.Module
    optimizer: Any
    layout: Layout
    seed: int
    num_steps: int


@dataclass
class Worked:
    """A step as this worker runs it."""

    split: Split
    part: WorkerPart
    program: Program
    updater: GraphUpdater
    player: SmallSums | None
    coordinates: Mapping[str, int]
    apart: bool
    donated: frozenset[str] = field(default_factory=frozenset)
    place: int = 0

    @cached_property
    def timed(self) -> Timed | None:
        """The program with its micro-batches one after the other, if it has any."""
        return in_slices(self.program)

    @property
    def _local(self) -> Program:
        return self.timed.programs[0] if self.timed else self.program

    @cached_property
    def _loops(self) -> Loops | None:
        owner, mesh = self.program.captured.owner, self.program.mesh
        return Loops(owner, self.player, mesh, self.coordinates, {}, {}) if self.timed else None

    @cached_property
    def graph(self) -> fx.Graph:
        """The program as it runs."""
        return played(self._local, self.donated)

    @cached_property
    def _function(self) -> Callable[..., tuple[list[Any], list[Any]]]:
        owner, mesh = self.program.captured.owner, self.program.mesh
        made = generate(self.graph, owner, self.player, mesh, self.coordinates, loops=self._loops)
        give_back_now()
        return made.function

    def run(
        self, inputs: list[Any], seed: int, step: int, *, checked: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """(what it returns, new buffers) for inputs; with `checked`, node by node."""
        if self.player is not None:
            self.player.begin()
        if checked:
            given = (self.player, self.coordinates, self._loops, seed, step)
            return Checked(self._local, *given).run(inputs)
        with torch.no_grad():
            return self._function(inputs, lambda stream: random.key(seed, stream, step))


def parts_of(
    step: Holder,
    batch: tuple[Any, ...],
    tables: frozenset[str] | None = None,
    *,
    apart: bool,
) -> tuple[Split, WorkerPart, Program]:
    """A step taken apart (of `tables` only rows travel), the worker's part of it, and that as a program;
    `apart`: for a worker whose pushes are updates of their own."""
    made = split(captured_for(step, batch, apart=apart), tables=tables)
    part = (alone if apart else together)(made)
    laid_out = worker_layout(step.layout, 1 if apart else step.layout.num_replicas)
    return made, part, worker_program(part, laid_out, strict=bool(os.environ.get(STRICT)))


class WorkerSide:
    """What a `Step` does on a worker; joins the servers at its first call and leaves them at exit.

    Weights lie in the model as this worker pulled them last; the optimizer holds no slots.
    """

    def __init__(self, step: Holder, role: Role) -> None:
        self.step, self.role = step, role
        self.consistency = consistency.parse(step.layout.sync)
        self.client: Client | None = None
        self._updater: GraphUpdater | None = None
        self._numbers: Mapping[str, float] | None = None
        keep_freed_memory()

    @property
    def apart(self) -> bool:
        """Whether this worker's next push is an update of its own."""
        return self.client.alone if self.client is not None else self.consistency.alone(0)

    def compiled(self, batch: tuple[Any, ...]) -> Worked:
        """The step for a batch like this one, as it runs now; joins the servers if that is to be done."""
        apart = self.apart
        made, part, program = parts_of(self.step, batch, self._tables, apart=apart)
        updater = GraphUpdater(made)
        self._join(updater)
        if apart != self.apart:  # the others are apart already
            return self.compiled(batch)
        count = program.layout.num_ranks
        player = SmallSums(self._add, self.role.number, count) if count > 1 else None
        coordinates = {"data": self.role.number} if count > 1 else {}
        own = own_memory(state_of(self.step.model, None)) & set(program.captured.updated)
        self.forget_slots()
        for captured in (made.captured, program.captured):
            forget_values(captured.state)
        return Worked(made, part, program, updater, player, coordinates, apart, own)

    def call(
        self, worked: Worked, given: Mapping[str, float], tensors: list[Tensor], *, checked: bool
    ) -> list[Any]:
        """One step; the leaves that it returns."""
        state = {s.name: s.tensor for s in state_of(self.step.model, None)}
        if worked.apart:
            tensors = parts.rows(tensors, self.role.number, self.step.layout.num_replicas)
        tables = {x.table: x.unique(_named(tensors)) for x in worked.part.lookups}
        read = {x.table: x.room(local_of(state[x.table])) for x in worked.part.lookups}
        wanted = {n: Rows(rows, read[n][: len(rows)]) for n, (rows, _) in tables.items()}
        self._pull(state, wanted, whole=(self._tables or frozenset()) - set(wanted))
        if worked.apart != self.apart:
            raise self._given_up()
        captured = worked.program.captured
        inputs = [local_of(state[s.name]) for s in captured.state]
        inputs += [*given.values(), *tensors]
        for name, (_, places) in tables.items():
            inputs += [read[name], places]
        seed = self.step.seed
        if worked.apart:
            seed = parts.seed_of(seed, self.role.number)
        returned, new = worked.run(inputs, seed, self.step.num_steps, checked=checked)
        for name, value in zip(captured.updated, new, strict=True):
            set_local(state[name], value)
        mine, gradients, extra = worked.part.parts(returned)
        numbers = {**given, **extra}
        pushed: dict[str, Tensor | Rows] = dict(gradients)
        for lookup in worked.part.lookups:
            name = lookup.table
            pushed[name] = Rows(*lookup.pushed(tables[name][0], gradients[name]))
        self._push(worked, pushed, numbers)
        if not worked.apart:
            numbers = self._pull(state, {}, whole=frozenset())
        return worked.part.result(mine, numbers)

    def refresh(self) -> None:
        """Bring the weights of now, for whoever reads the model between steps."""
        if self.client is None or self._updater is None:
            return
        if not self.apart and not any(v.rows for v in self._updater.variables):
            return
        state = {s.name: local_of(s.tensor) for s in state_of(self.step.model, None)}
        into = {v.name: state[v.name] for v in self._updater.variables}
        if self.consistency.predict:
            self.client.look(into)
            self._numbers = None  # the next gradient wants weights to come
            return
        self.client.pull(into)  # one that was begun before the last push
        self._numbers = self.client.pull(into).numbers

    def bring(self) -> None:
        """Put all state that the servers have into the model and the optimizer."""
        if self.client is None:
            return
        create_slots(self.step.optimizer)
        held = self.client.pull_state()
        for s in state_of(self.step.model, self.step.optimizer):
            own = held.get(s.owner or s.name)
            if own is not None:
                set_local(s.tensor, own[s.slot or WEIGHT].to(s.tensor.device))

    def forget_slots(self) -> None:
        """The servers have the optimizer's slots; here they would only grow old."""
        for one in optimizers_of(self.step.optimizer):
            one.state.clear()

    def hand_over(self) -> None:
        """Give the servers the state that the model and the optimizer hold; one worker does so for all."""
        self._numbers = None
        if self.client is not None and self.role.number == 0:
            assert self._updater is not None
            self.client.push_state(
                whole_state(self.step, {v.name for v in self._updater.variables})
            )

    def _join(self, updater: GraphUpdater) -> None:
        if self._updater is not None:
            check_same(updater, self._updater)
        if self.client is not None:
            return
        self._updater = updater
        client = Client(
            roles.addresses(self.step.layout),
            updater,
            worker=self.role.number,
            consistency=self.consistency,
            secret=roles.secret(),
            tls=roles.tls(),
            traffic=self.consistency.traffic,
        )
        client.join()
        self.client = client
        residence_of(self.step.model, self.step.layout).fetch = self.refresh
        atexit.register(client.leave)

    @property
    def _tables(self) -> frozenset[str] | None:
        """The tables whose rows travel alone, once that is settled."""
        if self._updater is None:
            return None
        return frozenset(v.name for v in self._updater.variables if v.rows)

    def _pull(
        self, state: Mapping[str, Tensor], rows: Mapping[str, Rows], whole: frozenset[str]
    ) -> Mapping[str, float]:
        """The weights for the next gradient, of large tables the `rows`, or what is to come `whole`; the
        numbers of the last update."""
        assert self.client is not None and self._updater is not None
        numbers, due = self._numbers, self._numbers is None
        own = [v.name for v in self._updater.variables if due and not v.rows] + sorted(whole)
        into = {name: local_of(state[name]) for name in own}
        if own or rows:
            numbers = self._numbers = self.client.pull(into, rows).numbers
        if due and self.consistency.ahead and not self._tables:
            self.client.prefetch(into)
        assert numbers is not None
        return numbers

    def _push(
        self, worked: Worked, gradients: Mapping[str, Tensor | Rows], numbers: Mapping[str, float]
    ) -> None:
        assert self.client is not None
        names = worked.updater.numbers if worked.apart else worked.updater.given
        pushed = self.client.push(gradients, {n: numbers[n] for n in names})
        self._numbers = None
        if not pushed.taken and not worked.apart:
            raise self._given_up()

    def _given_up(self) -> ServerError:
        first = f"the first {self.consistency.after} steps of " if self.consistency.both else ""
        return ServerError(
            f"{self.role} was not heard of, and the others have gone on without it",
            why=f"with {first}sync={self.consistency} each update is made of the gradients of one clock",
            fix="start the run again from a checkpoint, or sync=async",
        )

    def _add(self, _name: str, values: Tensor) -> Tensor:
        assert self.client is not None
        return self.client.sum(values)


def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
    """The batch's tensors by the names of the graph's inputs."""
    return {f"batch.{i}": x for i, x in enumerate(tensors)}
