"""A step with its variables on servers, for a worker and for a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from tutti.calls.guards import guard_of
from tutti.calls.running import Running
from tutti.capture.python.assumed_values import Assumed
from tutti.job import Job
from tutti.launch.roles import SERVER, Role, is_first_worker, role_now
from tutti.modes.compiled_program import Compiled
from tutti.partition.partition import Program
from tutti.report.memory_course import memory_facts
from tutti.report.program_facts import program_facts
from tutti.report.servers import explain_servers, server_facts
from tutti.server.protocol import consistency
from tutti.server.split.three_parts import Split
from tutti.serving.server_side import serve
from tutti.serving.worked import Worked, parts_of
from tutti.serving.worker_side import WorkerSide
from tutti.state.residence import whole_of
from tutti.torch_private.pytrees import tree_map_only
from tutti.verification.verify_servers import compare_servers


class Served:
    """A server serves from its first call to its end; a worker pulls, computes and pushes at each call."""

    compare = staticmethod(compare_servers)

    def __init__(self, job: Job) -> None:
        self.job = job
        self.running = Running(job)

    @property
    def served(self) -> Served:
        """This mode."""
        return self

    @cached_property
    def role(self) -> Role:
        """The role of this process. Raises `LayoutError` if it is neither worker nor server."""
        return role_now(self.job.layout)

    @cached_property
    def worker(self) -> WorkerSide:
        """The side of a worker."""
        return WorkerSide(self.job, self.role)

    def before(self, batch: tuple[Any, ...]) -> None:
        """A server serves here; `SystemExit` ends it."""
        if self.role.kind == SERVER:
            self.job.refuse_empty(batch)
            whole = tree_map_only(Tensor, whole_of, batch)
            serve(self.job, self.role, whole, self.running.num_steps)
            raise SystemExit(0)

    def after(self) -> None:
        """Nothing to do: the push was part of the call."""

    def signature(self, made: Any) -> Any:
        """`made`, and whether this worker's next push is a separate update."""
        return made, self.worker.apart

    def compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], assumed: Assumed | None
    ) -> Compiled[Any]:
        """A worker's current program; joins the servers at the first call."""
        self.running.begin_together(batch)
        whole = tree_map_only(Tensor, whole_of, batch)
        worked = self.worker.compiled(whole, self.running.python.findings)
        if not worked.apart:  # else workers have values of their own, and a checkpoint those of one
            self.running.python.note_changed(worked.split.captured)
        return OnWorker(worked.program, worked, guard_of(worked.split.captured), mode=self)

    def parts_of(self, batch: tuple[Any, ...]) -> tuple[Split, Program]:
        """The split step, and the program of a worker, without a run."""
        apart = consistency.parse(self.job.layout.sync).alone(0)
        with self._joined.opened() if self._joined is not None else nullcontext():
            made, _, program = parts_of(self.job, batch, apart=apart)
        return made, program

    def program_of(self, batch: tuple[Any, ...]) -> Program:
        """The program of a worker's first call."""
        return self.parts_of(batch)[1]

    def explain_call(self, batch: tuple[Any, ...], *, tensor: str | None, graph: bool) -> str:
        """The variables, their servers, and the traffic of a worker's first call."""
        return explain_servers(*self.parts_of(batch), self.job.layout, graph=graph)

    @property
    def _joined(self) -> WorkerSide | None:
        """The side of a worker that has joined."""
        side: WorkerSide | None = self.__dict__.get("worker")
        return side if side is not None and side.has_joined else None

    @contextmanager
    def state_here(self) -> Iterator[None]:
        """Context in which the model and the optimizer hold the servers' state."""
        side = self._joined
        if side is not None:
            side.bring()
        yield
        if side is not None:
            side.weights.forget_slots()

    @contextmanager
    def state_replaced(self) -> Iterator[None]:
        """The servers take over the state of the model and the optimizer at the end.

        All workers do this together: none pushes a gradient of the old state after it, or pulls that state.
        """
        with self.state_here():
            yield
            if self._joined is not None:
                self._joined.meet()
                self._joined.hand_over()
                self._joined.meet()

    def writes(self) -> bool:
        """Only the ranks of the first remaining worker do; before the first call, those of worker 0."""
        side = self._joined
        return side.is_first() if side is not None else is_first_worker()


@dataclass(eq=False)
class OnWorker(Compiled[Worked]):
    """A program of `Served` on one rank of a worker."""

    mode: Served = field(kw_only=True)

    def play(
        self, given: Mapping[str, float], tensors: list[Tensor], *, checked: bool
    ) -> list[Any]:
        """Pull, forward and backward, push."""
        running, whole = self.mode.running, [whole_of(x) for x in tensors]
        with running.divergence.watching(self.number, None, ()):
            return self.mode.worker.call(
                self.execution, given, whole, running.num_steps, checked=checked
            )

    def explain(self, *, tensor: str | None, graph: bool) -> str:
        """The variables, their servers, the memory of a worker, and the traffic of each step."""
        return explain_servers(
            self.execution.split,
            self.program,
            self.mode.job.layout,
            graph=graph,
            measured=self.measured,
            run=self.execution.graph,
            timed=self.execution.timed,
            apart=self.execution.apart,
        )

    def facts(self) -> dict[str, Any]:
        """The variables and their servers; memory and collectives of a worker."""
        worked, layout = self.execution, self.mode.job.layout
        made = program_facts(self.program, worked.timed, worked.graph)
        made |= {"memory": self.memory_facts()}
        return made | {"layout": str(layout), "servers": server_facts(worked.split, layout)}

    def memory_facts(self) -> dict[str, Any]:
        """The predicted memory of a worker."""
        worked = self.execution
        local = worked.timed.programs[0] if worked.timed else self.program
        return memory_facts(local, worked.graph)
