"""The interface of a mode, a way to run a job, for a `Step`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tutti.calls.running import Running
from tutti.capture.python.assumed_values import Assumed
from tutti.job import Job
from tutti.modes.compiled_program import Compiled
from tutti.partition.partition import Program
from tutti.verification.verdict import Verdict


class Mode(Protocol):
    """A way to run a job. All ranks call each method together.

    `running` is the running job. `served` is the mode itself if servers keep the variables of a training
    step, else None.
    """

    running: Running

    def __init__(self, job: Job) -> None: ...

    @property
    def served(self) -> Any: ...

    def before(self, batch: tuple[Any, ...]) -> None:
        """Begin a call; a server serves here until the workers have left, and ends the process."""
        ...

    def signature(self, made: Any) -> Any:
        """The key of a program: `made` from the call, and the mode's other distinctions."""
        ...

    def compile(
        self, batch: tuple[Any, ...], kind: Any, given: Mapping[str, float], assumed: Assumed | None
    ) -> Compiled[Any]:
        """The program for a batch like this one, ready to play.

        Args:
            batch: global.
            kind: the common key of calls that differ only in sizes and inputs.
            given: the numbers of this call.
            assumed: the tensor values that a run with other branches has read.
        """
        ...

    def after(self) -> None:
        """End a call, after the step count has changed."""
        ...

    def program_of(self, batch: tuple[Any, ...]) -> Program:
        """The program for a call with `batch`, without a run."""
        ...

    def explain_call(self, batch: tuple[Any, ...], *, tensor: str | None, graph: bool) -> str:
        """The text of `explain` after a call with `batch`, without a run."""
        ...

    def state_here(self) -> AbstractContextManager[None]:
        """Context in which the model and the optimizer hold the current state."""
        ...

    def state_replaced(self) -> AbstractContextManager[None]:
        """As `state_here`; the content of the model and the optimizer at the end becomes the state."""
        ...

    def writes(self) -> bool:
        """Whether this process takes part in writing checkpoints; asked at each save, on all ranks."""
        ...

    @staticmethod
    def compare(job: Job, batch: tuple[Any, ...], *, steps: int, dtype: torch.dtype) -> Verdict:
        """`tutti.verify` for a job of this mode."""
        ...
