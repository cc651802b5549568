"""A worker of a run with servers: pull, forward and backward, push."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.findings import Findings
from tutti.capture.state.lift import state_of
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.errors import ServerError
from tutti.execution.allocator import keep_freed_memory
from tutti.execution.execute import describe
from tutti.graph.players.player import Player
from tutti.job import Job
from tutti.launch import roles
from tutti.launch.good_end import at_good_end
from tutti.launch.roles import Role
from tutti.partition.partition import Program
from tutti.pipeline.targets import between_ranks
from tutti.replicas import replica_rows
from tutti.server.protocol import consistency
from tutti.server.protocol.table_rows import Rows
from tutti.server.protocol.update import WEIGHT
from tutti.server.split.small_sums import SmallSums
from tutti.server.split.sparse_tables import TableLookup
from tutti.server.split.two_levels import REPLICA, TwoLevels
from tutti.server.split.updater import GraphUpdater, check_same
from tutti.server.wire.client import Client
from tutti.server.wire.worker_ranks import WorkerRanks
from tutti.serving.absent_tables import AbsentTables
from tutti.serving.edits import Edits, edited_alone, edited_apart
from tutti.serving.server_side import whole_state
from tutti.serving.worked import Worked, parts_of
from tutti.serving.worker_weights import WorkerWeights
from tutti.state.residence import forget_values, local_of, own_memory, set_local, whole_of
from tutti.state.residences import residence_of
from tutti.user_lines import quoted, user_line


class WorkerSide:
    """A job on a worker; joins the servers at its first call and leaves them at exit.

    The model holds the weights of this worker's last pull; the optimizer holds no slots. If a worker has
    several ranks, only the first has a `client`; all of them call together.
    """

    def __init__(self, job: Job, role: Role) -> None:
        self.job, self.role = job, role
        self.consistency = consistency.parse(job.layout.sync)
        self.client: Client | None = None
        self._updater: GraphUpdater | None = None
        self._numbers: Mapping[str, float] | None = None
        self._edits = Edits([])
        self._absent = AbsentTables((), None)
        self._apart = self.consistency.alone(0)
        self._begun = False
        keep_freed_memory()

    @property
    def apart(self) -> bool:
        """Whether this worker's next push is a separate update."""
        return self._apart

    @cached_property
    def worker_ranks(self) -> WorkerRanks:
        """The ranks of this worker, which must have met."""
        return WorkerRanks(self.job.layout.worker_size)

    @cached_property
    def weights(self) -> WorkerWeights:
        """The weights on this rank."""
        return WorkerWeights(self.job, self.worker_ranks)

    def compiled(self, batch: tuple[Any, ...], findings: Findings) -> Worked:
        """The executed step for a batch like this one; joins the servers if needed. `findings` as for
        `capture`."""
        with self.opened():
            return self._compiled(batch, findings)

    def opened(self) -> AbstractContextManager[None]:
        """Inside, tables that travel by row are ordinary parameters, for their forms."""
        return self._absent.opened(self.weights.state)

    def _compiled(self, batch: tuple[Any, ...], findings: Findings) -> Worked:
        apart = self.apart
        if self._updater is not None:
            self.weights.make_slots(self._updater.variables)  # capture reads them
        made, part, program = parts_of(self.job, batch, self._tables, findings, apart=apart)
        check_order([describe(n) for n in program.collectives])
        updater = GraphUpdater(made)
        self._join(updater)
        self.weights.forget_slots()
        self.weights.settle(program)
        if apart != self.apart:  # the other workers are apart already
            return self._compiled(batch, findings)
        own = own_memory(state_of(self.job.model, None)) & set(program.captured.updated)
        for captured in (made.captured, program.captured):
            forget_values(captured.state)
        sums, player, coordinates = self._players(program)
        return Worked(made, part, program, updater, player, sums, coordinates, apart, own)

    def _players(self, program: Program) -> tuple[SmallSums | None, Player | None, dict[str, int]]:
        """The player of sums over the workers, the player of all collectives, this rank's coordinates."""
        inside: Player | None = None
        coordinates = self.weights.coordinates
        if self.worker_ranks.size > 1:
            used = [
                tuple(a for a in axes if a in coordinates) for axes in between_ranks(program.graph)
            ]
            inside = ProcessGroups(self.weights.home.groups_for(filter(None, used)))
        count = program.layout.num_replicas
        if count == 1:
            return None, inside, coordinates
        sums, coordinates = (
            SmallSums(self._add, self.role.number, count),
            {REPLICA: self.role.number, **coordinates},
        )
        if inside is None:
            return sums, sums, coordinates
        return sums, TwoLevels(inside, sums, program.layout.mesh, coordinates), coordinates

    def call(
        self,
        worked: Worked,
        given: Mapping[str, float],
        tensors: list[Tensor],
        num_steps: int,
        *,
        checked: bool,
    ) -> list[Any]:
        """One step after `num_steps` others; its returned leaves."""
        state = self.weights.state
        self._take_over_edits(state)
        whole = (self._tables or frozenset()) - {x.table for x in worked.part.lookups}
        self._absent.show(state, whole)
        try:
            with self._absent.opened(state):
                returned = self._called(worked, state, whole, given, tensors, num_steps, checked)
        finally:
            self._absent.hide(state)
        self._edits.note(state)
        return returned

    def _called(
        self,
        worked: Worked,
        state: Mapping[str, Tensor],
        whole: frozenset[str],
        given: Mapping[str, float],
        tensors: list[Tensor],
        num_steps: int,
        checked: bool,
    ) -> list[Any]:
        if worked.apart:
            tensors = replica_rows.rows(tensors, self.role.number, self.job.layout.num_replicas)
        tables = {x.table: x.unique(_named(tensors)) for x in worked.part.lookups}
        read = {x.table: _room(x, state[x.table]) for x in worked.part.lookups}
        wanted = {n: Rows(rows, read[n][: len(rows)]) for n, (rows, _) in tables.items()}
        self._check_begin(num_steps)
        self._pull(state, wanted, whole=whole)
        captured = worked.program.captured
        outside = captured.outside
        inputs: list[Any] = [
            outside[s.name].get() if s.name in outside else local_of(state[s.name])
            for s in captured.state
        ]
        inputs += [*given.values(), *tensors]
        for name, (_, places) in tables.items():
            inputs += [read[name], places]
        seed = self.job.seed
        if worked.apart:
            seed = replica_rows.seed_of(seed, self.role.number)
        returned, new = worked.run(inputs, seed, num_steps, checked=checked)
        for name, value in zip(captured.updated, new, strict=True):
            set_local(state[name], value)
        mine, gradients, extra = worked.part.parts(returned)
        numbers = {**given, **extra}
        pushed: dict[str, Tensor | Rows] = dict(gradients)
        for lookup in worked.part.lookups:
            name = lookup.table
            pushed[name] = Rows(*lookup.pushed(tables[name][0], gradients[name]))
        if self.client is not None:
            self._push(self.client, worked, pushed, numbers)
        self._numbers = None
        if not worked.apart:
            numbers = self._pull(state, {}, whole=frozenset())
        return worked.part.result(mine, numbers)

    def refresh(self) -> None:
        """Pull the current weights, for a reader of the model between steps."""
        if self._updater is None:
            return
        state = self.weights.state
        if not self.apart and not self._absent.absent(state):
            return
        self._take_over_edits(state)
        self._absent.show(state)
        rooms = self.weights.rooms(state, [v.name for v in self._updater.variables])
        if self.consistency.predict:
            if self.client is not None:
                self.client.look(rooms)
            self._numbers = None  # the next gradient needs predicted weights
        else:
            if self.client is not None:
                self.client.pull(rooms)  # completes the prefetch begun before the last push
                self._numbers = self.client.pull(rooms).numbers
            self._numbers = self._told(self._numbers or {})
        self.weights.take(state, rooms)
        self._edits.note(state)

    def _bring_tables(self) -> None:
        """Pull the tables that travel by row, for a use by the script between steps."""
        state, client = self.weights.state, self.client
        assert client is not None
        with torch.inference_mode(False):
            absent = self._absent.absent(state)
            self._absent.show(state, absent)
            rooms = self.weights.rooms(state, absent)
            client.look(rooms)
            self.weights.take(state, rooms)
            self._edits.note(state, absent)

    def _take_over_edits(self, state: Mapping[str, Tensor]) -> None:
        """Hand the servers the weights that the script has changed since the last call.

        Raises:
            ServerError: this worker alone has changed some; or workers are apart.
        """
        edited = self.worker_ranks.some_say(self._edits.found(state))
        if not edited:
            return
        if self.apart and self.job.layout.num_replicas > 1:
            raise edited_apart(edited[0], self.consistency)
        all_do = self.client is None or self.client.all_do(self.job.layout.num_replicas)
        if not self.worker_ranks.told({_ALL: float(all_do)})[_ALL]:
            raise edited_alone(edited[0], self.role)
        whole = {name: {WEIGHT: whole_of(state[name]).cpu()} for name in edited}
        if self.client is not None and self.role.number == 0:
            self.client.push_state(whole)
        self.meet()
        self._numbers = None

    def bring(self) -> None:
        """Copy all state of the servers into the model and the optimizer."""
        if self._updater is None:
            return
        state = self.weights.state
        self._take_over_edits(state)
        self._absent.show(state)
        self.weights.make_slots(self._updater.variables)
        held = self.client.pull_state() if self.client is not None else {}
        for v in self._updater.variables:
            for slot, (shape, dtype) in {WEIGHT: (v.shape, v.dtype), **v.slots}.items():
                if self.client is None:
                    held.setdefault(v.name, {})[slot] = torch.empty(shape, dtype=dtype)
                self.worker_ranks.share(held[v.name][slot])
        for s in state_of(self.job.model, self.job.optimizer):
            own = held.get(s.owner or s.name)
            if own is not None:
                self.weights.put(s, own[s.slot or WEIGHT])
        self._edits.note(state)

    @property
    def has_joined(self) -> bool:
        """Whether servers know this worker."""
        return self._updater is not None

    def is_first(self) -> bool:
        """Whether this is the first remaining worker, which saves for all; all of its ranks call together."""
        if self.role.number == 0:
            return True
        first = self.client is not None and self.client.is_first()
        return bool(self.worker_ranks.told({_FIRST: float(first)})[_FIRST])

    def meet(self) -> None:
        """Wait for all remaining workers."""
        if self.client is not None:
            self.client.meet()
        self._told({})

    def hand_over(self) -> None:
        """Send the servers the state of the model and the optimizer; one worker does so for all."""
        self._numbers = None
        if self._updater is not None and self.role.number == 0:
            held = whole_state(
                self.job.model, self.job.optimizer, {v.name for v in self._updater.variables}
            )
            if self.client is not None:
                self.client.push_state(held)
        self._edits.note(self.weights.state)

    def _join(self, updater: GraphUpdater) -> None:
        if self._updater is not None:
            check_same(updater, self._updater)
            return
        self._refuse_second()
        _JOINED.append(weakref.ref(self))
        self._updater, self._edits = updater, Edits(updater.variables)
        bring = self._bring_tables if self.worker_ranks.size == 1 else None
        self._absent = AbsentTables([v.name for v in updater.variables if v.rows], bring)
        residence_of(self.job.model, self.job.layout).fetch = self.refresh
        if self.worker_ranks.speaks:
            self._connect(updater)
        self._told({})

    def _refuse_second(self) -> None:
        """Refuse another training step of this process beside the one that has joined."""
        if any(known() is not None for known in _JOINED):
            gc.collect()  # a step that nobody has any more does not count
        for known in _JOINED:
            other = known()
            if other is not None and other is not self:
                raise ServerError(
                    f"two training steps of one script under servers: {other.job.step_name} and "
                    f"{self.job.step_name}",
                    at=quoted(user_line()),
                    why="servers run the update of the step that a script calls first, and keep its weights",
                    fix="one step with both updates; or a layout without server",
                )

    def _connect(self, updater: GraphUpdater) -> None:
        client = Client(
            roles.addresses(self.job.layout),
            updater,
            worker=self.role.number,
            consistency=self.consistency,
            secret=roles.secret(),
            tls=roles.tls(),
            traffic=self.consistency.traffic,
            has_ended=roles.has_ended,
        )
        client.join()
        self.client = client
        # under `step` the others must not go on without the rows of a worker whose script has failed
        (atexit.register if self.consistency.apart else at_good_end)(client.leave)

    def _check_begin(self, num_steps: int) -> None:
        """Refuse a worker that comes to updates together at another step than the others.

        Raises:
            ServerError: it was started again, or late, and the others are elsewhere.
        """
        client, begun, self._begun = self.client, self._begun, True
        if begun or client is None or client.alone or client.clock == num_steps:
            return
        raise ServerError(
            f"{self.role} comes with step {num_steps}, and the others are at step {client.clock}",
            at=quoted(user_line()),
            why="while workers update together, each update is made of the rows of one batch",
            fix="start all workers and servers again, from one checkpoint",
        )

    @property
    def _tables(self) -> frozenset[str] | None:
        """The tables whose rows travel alone, once known."""
        if self._updater is None:
            return None
        return frozenset(v.name for v in self._updater.variables if v.rows)

    def _pull(
        self, state: Mapping[str, Tensor], rows: Mapping[str, Rows], whole: frozenset[str]
    ) -> Mapping[str, float]:
        """Pull the weights for the next gradient, of large tables the `rows`, or the `whole` ones given; the
        numbers of the last update."""
        assert self._updater is not None
        numbers, due = self._numbers or {}, self._numbers is None
        own = [v.name for v in self._updater.variables if due and not v.rows] + sorted(whole)
        rooms = self.weights.rooms(state, own)
        if self.client is not None and (own or rows):
            numbers = self.client.pull(rooms, rows).numbers
        if self.client is not None and due and self.consistency.ahead and not self._tables:
            self.client.prefetch(rooms)
        if own or rows:
            self._numbers = self._told(numbers)
        self.weights.take(state, rooms)
        for some in rows.values():
            self.worker_ranks.share(some.values)
        assert self._numbers is not None
        return self._numbers

    def _push(
        self,
        client: Client,
        worked: Worked,
        gradients: Mapping[str, Tensor | Rows],
        numbers: Mapping[str, float],
    ) -> None:
        names = worked.updater.numbers if worked.apart else worked.updater.given
        client.push(gradients, {n: numbers[n] for n in names})

    def _told(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The first rank's numbers, and whether workers are apart."""
        own = {_APART: float(self.client.alone)} if self.client is not None else {}
        found = self.worker_ranks.told({**numbers, **own})
        self._apart = bool(found.pop(_APART))
        return found

    def _add(self, _name: str, values: Tensor) -> Tensor:
        return self.worker_ranks.sum(
            values, self.client.sum if self.client is not None else _unheard
        )


# The sides of this process that have joined; the servers take one.
_JOINED: list[weakref.ref[WorkerSide]] = []
# A name among the numbers that a first rank broadcasts.
_APART = " apart"
_FIRST = " first"
_ALL = " all"


def _room(lookup: TableLookup, table: Tensor) -> Tensor:
    """A buffer for whole rows of a table, which this rank may hold in parts."""
    return local_of(table).new_zeros((lookup.num_rows, *table.shape[1:]))


def _unheard(_: Tensor) -> Tensor:
    raise AssertionError("the first rank of a worker speaks for all")


def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
    """The batch's tensors by the names of the graph's inputs."""
    return {f"batch.{i}": x for i, x in enumerate(tensors)}
