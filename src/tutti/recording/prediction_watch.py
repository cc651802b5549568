"""Watches the first calls of a step in a run without records: one line of measured and predicted figures."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Any, Protocol

from tutti.capture.state.lift import optimizers_of
from tutti.environment import PREDICTION, RUN_DIR
from tutti.job import Job
from tutti.recording.first_calls import FirstCalls
from tutti.recording.step_forecast import beside, call_and_held, say

_numbers = count(1)  # of the steps that train, in this process


class MeasuredProgram(Protocol):
    """What is read of a program."""

    measured: int | None

    def memory_facts(self) -> dict[str, Any]: ...


class PredictionWatch:
    """The line of one step, on the rank that leads.

    Args:
        name: of the function of the step.
        predicted_seconds: of a step by the plan that chose the layout; None without a plan.
        on_gpu: the model is there.
    """

    def __init__(self, name: str, predicted_seconds: float | None, *, on_gpu: bool) -> None:
        self._number, self._name = next(_numbers), name
        self._predicted_seconds, self._on_gpu = predicted_seconds, on_gpu
        self._first = FirstCalls(wants_memory=True, wants_seconds=True)

    def begins(self) -> None:
        """A call begins."""
        self._first.begins()

    def measures(self, program: MeasuredProgram) -> bool:
        """Whether to measure the memory of `program`, which plays now."""
        return self._first.measures(program)

    def ended(self, step: int, result: Any, program: MeasuredProgram | None) -> None:
        """A call has ended; None for the program of a first, eager one."""
        first = self._first
        if not first.wants_seconds:
            return
        seconds = first.seconds(time.perf_counter(), on_gpu=self._on_gpu)
        if program is None or program is not first.program:
            first.change(program)
        elif (measured := first.add(seconds)) is not None:
            self._tell(measured, program)
        first.ended()

    def _tell(self, seconds: float, program: MeasuredProgram) -> None:
        nbytes = program.measured
        memory = {} if nbytes is None else _memory_facts(program)
        line = beside(seconds, self._predicted_seconds, nbytes, *call_and_held(memory))
        say(line, "" if self._number == 1 else self._name)


def _memory_facts(program: MeasuredProgram) -> dict[str, Any]:
    """The predicted memory of a call."""
    try:
        return program.memory_facts()
    except Exception:  # a line must not end the run that it is about
        return {}


def prediction_watch_of(job: Job, predicted_seconds: float | None) -> PredictionWatch | None:
    """The watch of a step that trains, on the rank of `tutti run` that leads; else None."""
    leads = RUN_DIR.read() and os.environ.get("RANK", "0") == "0"
    if not leads or not PREDICTION.read() or not optimizers_of(job.optimizer):
        return None
    on_gpu = any(x.is_cuda for x in job.model.parameters())
    return PredictionWatch(job.step_name, predicted_seconds, on_gpu=on_gpu)
