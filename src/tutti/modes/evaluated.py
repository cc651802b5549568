"""A step without an optimizer in a run with servers: each process plays it with the current weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tutti.environment import ROLE
from tutti.job import Job
from tutti.launch.roles import WORKER, Role
from tutti.layout import Layout
from tutti.modes.plain import Plain
from tutti.state.residences import refresh


class Evaluated(Plain):
    """Plays the whole batch on the ranks of one worker, or on one server alone."""

    def __init__(self, job: Job) -> None:
        super().__init__(replace(job, layout=_layout_here(job.layout)))

    def before(self, batch: tuple[Any, ...]) -> None:
        """Pull the servers' weights."""
        refresh(self.job.model)


def _layout_here(layout: Layout) -> Layout:
    """The layout of one worker; on a server one rank."""
    role = Role.parse(ROLE.read() or f"{WORKER} 0")
    alone = role.kind != WORKER
    return replace(layout.of_one, axes={}) if alone else layout.of_one
