"""What each way to run a job does for a `Step`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tutti.calls.running import Running
from tutti.capture.python.read_values import Seen
from tutti.job import Job
from tutti.modes.compiled_program import Compiled
from tutti.partition.partition import Program
from tutti.verification.verdict import Verdict


class Mode(Protocol):
    """A way to run a job. All ranks call each method together.

    `running` is the job under way. `served` is the mode itself where servers keep the variables of a training
    step, else None.
    """

    running: Running

    def __init__(self, job: Job) -> None: ...

    @property
    def served(self) -> Any: ...

    def before(self, batch: tuple[Any, ...]) -> None:
        """A call begins; a server serves here until the workers have left, and ends the process."""
        ...

    def signature(self, made: Any) -> Any:
        """The key of a program: `made` from the call, and what else tells programs of this mode apart."""
        ...

    def compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], seen: Seen | None
    ) -> Compiled[Any]:
        """The program for a batch like this one, ready to play.

        Args:
            batch: global.
            kind: what calls have in common that differ in nothing but sizes and inputs.
            given: the numbers of this call.
            seen: what a run that went another way has read from tensors.
        """
        ...

    def after(self) -> None:
        """A call has been played, and counted."""
        ...

    def program_of(self, batch: tuple[Any, ...]) -> Program:
        """The program that a call with `batch` would run, without running anything."""
        ...

    def explain_call(self, batch: tuple[Any, ...], *, tensor: str | None, graph: bool) -> str:
        """What `explain` would say after a call with `batch`, without running anything."""
        ...

    def state_here(self) -> AbstractContextManager[None]:
        """Inside, the model and the optimizer hold the state of now."""
        ...

    def state_replaced(self) -> AbstractContextManager[None]:
        """As `state_here`; what the model and the optimizer hold at the end is the state from then on."""
        ...

    def writes(self) -> bool:
        """Whether this process takes part in writing checkpoints."""
        ...

    @staticmethod
    def compare(job: Job, batch: tuple[Any, ...], *, steps: int, dtype: torch.dtype) -> Verdict:
        """`tutti.verify` for a job of this mode."""
        ...
