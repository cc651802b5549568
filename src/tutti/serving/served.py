"""A step whose variables are kept by servers, on whichever side of them this process is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from tutti.environment import ROLE
from tutti.launch.roles import WORKER, Role, role_now
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.server.protocol import consistency
from tutti.server.split.three_parts import Split
from tutti.serving.server_side import serve
from tutti.serving.worked import Holder, Worked, parts_of
from tutti.serving.worker_side import WorkerSide

__all__ = [
    "Served",
    "Worked",
    "layout_of_evaluation",
    "serve",
    "state_here",
    "state_replaced",
    "writes",
]


class Served:
    """What belongs to a training step in a run with servers; does nothing before its first call."""

    def __init__(self, step: Holder) -> None:
        self._step = step

    @cached_property
    def role(self) -> Role:
        """What this process is. Raises `LayoutError` where it is neither worker nor server."""
        return role_now(self._step.layout)

    @cached_property
    def worker(self) -> WorkerSide:
        """The side of a worker."""
        return WorkerSide(self._step, self.role)

    @property
    def apart(self) -> bool:
        """Whether this worker's next push is an update of its own."""
        return self.worker.apart

    def parts_of(self, batch: tuple[Any, ...]) -> tuple[Split, Program]:
        """The step taken apart, and the program of a worker, without running anything."""
        apart = consistency.parse(self._step.layout.sync).alone(0)
        made, _, program = parts_of(self._step, batch, apart=apart)
        return made, program

    @property
    def joined(self) -> WorkerSide | None:
        """The side of a worker that servers know already."""
        side: WorkerSide | None = self.__dict__.get("worker")
        return side if side is not None and side.has_joined else None


@contextmanager
def state_here(served: Served | None) -> Iterator[None]:
    """Inside, the model and the optimizer hold what the servers have."""
    side = served.joined if served is not None else None
    if side is not None:
        side.bring()
    yield
    if side is not None:
        side.weights.forget_slots()


@contextmanager
def state_replaced(served: Served | None) -> Iterator[None]:
    """The servers take over what the model and the optimizer hold at the end."""
    with state_here(served):
        yield
        if served is not None and served.joined is not None:
            served.joined.hand_over()


def writes(served: Served | None) -> bool:
    """Whether this process writes checkpoints: of workers and servers the ranks of the first worker."""
    role = Role.parse(ROLE.read() or f"{WORKER} 0")
    return served is None or (role.kind, role.number) == (WORKER, 0)


def layout_of_evaluation(layout: Layout) -> Layout:
    """Where a step without an optimizer runs: on a worker's ranks, or on one server alone."""
    role = Role.parse(ROLE.read() or f"{WORKER} 0")
    alone = layout.server and role.kind != WORKER
    return replace(layout.of_one, axes={}) if alone else layout.of_one
