"""Watches the calls of one step: their times, returned scalars and programs, for the records of the run.

The facts of a program are written behind its first call; on the rank that leads, `FirstCalls` measures the
next ones, which are printed beside the prediction. Other calls cost two readings of a clock and a list entry.
"""

from __future__ import annotations

import inspect
import math
import os
import time
import traceback
import warnings
from typing import Any, Protocol

from torch import Tensor, nn

from tutti.capture.state.lift import optimizers_of
from tutti.capture.state.models import Models
from tutti.job import Job
from tutti.recording.first_calls import FirstCalls
from tutti.recording.returned_scalars import ReturnedScalars
from tutti.recording.run_writer import RunWriter
from tutti.recording.step_forecast import beside, call_and_held, say
from tutti.recording.step_rows import StepRows
from tutti.user_lines import users_level

MOST_DESCRIBED = 3  # programs of one step with all their facts


class Watched(Protocol):
    """What is read of a program."""

    number: int
    measured: int | None
    why: str

    def facts(self) -> dict[str, Any]: ...

    def memory_facts(self) -> dict[str, Any]: ...


class StepWatch:
    """The records of one step of `tutti.distribute` on this rank.

    Args:
        out: the file of this process.
        job: of the step.
        predicted_seconds: of a step by the plan that chose the layout; None without a plan.
    """

    def __init__(self, out: RunWriter, job: Job, predicted_seconds: float | None) -> None:
        self._out, self._job, self._predicted_seconds = out, job, predicted_seconds
        self._number = next(out.numbers)
        self._scalars, self._rows = ReturnedScalars(), StepRows(out, self._number)
        self._known: dict[int, dict[str, Any]] = {}  # the facts of each program
        trains = bool(optimizers_of(job.optimizer))
        self._first = FirstCalls(wants_memory=out.leads and trains, wants_seconds=out.leads)
        self._on_gpu: bool | None = None

    def begins(self) -> None:
        """A call begins."""
        self._first.begins()

    def measures(self, program: Watched) -> bool:
        """Whether to measure the memory of `program`, which plays now."""
        return self._first.measures(program)

    def ended(self, step: int, result: Any, program: Watched | None) -> None:
        """A call has ended with `result` after `step` steps; None for the program of a first, eager one."""
        now = time.perf_counter()
        if self._on_gpu is None:
            self._describe_step()
        seconds = self._first.seconds(now, on_gpu=bool(self._on_gpu))
        if program is not self._first.program:
            self._scalars.forget()
        if program is not None and program is self._first.program:
            measured = self._first.add(seconds)
            if measured is not None:
                self._tell(measured, program)
        else:
            self._change(step, seconds, program)
        if self._first.measuring:
            seconds = math.nan  # under the profiler
        values = self._scalars.of(result)
        self._rows.add(step, now, seconds, self._scalars.names, values)
        self._first.ended()

    def _change(self, step: int, seconds: float, program: Watched | None) -> None:
        """Another program than that of the last call."""
        self._first.change(program)
        if program is None or program.number in self._known:
            return
        facts = self._facts(program) if len(self._known) < MOST_DESCRIBED else {}
        self._known[program.number] = facts
        made = {"of": self._number, "number": program.number, "step": step, "why": program.why}
        self._out.write("program", **made, seconds=seconds, facts=facts)

    def _facts(self, program: Watched) -> dict[str, Any]:
        """All facts on the leading rank; their own memory on others of a pipeline; else none."""
        try:
            if self._out.leads:
                return program.facts()
            return {"memory": program.memory_facts()} if _leads_pipe_rank(self._job) else {}
        except Exception as error:  # a report must not end the run that it is about
            told = f"{type(error).__name__}: {error}"
            self._out.write("problem", text=told, trace=traceback.format_exc()[-2000:])
            warnings.warn(
                f"the report lacks the facts of a program: {told}", stacklevel=users_level()
            )
            return {}

    def _tell(self, seconds: float, program: Watched) -> None:
        facts = self._known.get(program.number, {})
        call_nbytes, held_nbytes = call_and_held(facts.get("memory", {}))
        predicted = self._predicted_seconds
        shown = {"seconds": seconds, "predicted_seconds": predicted, "nbytes": program.measured}
        counted = {"predicted_nbytes": call_nbytes, "held_nbytes": held_nbytes}
        self._out.write("measured", of=self._number, **shown, **counted)
        line = beside(seconds, predicted, program.measured, call_nbytes, held_nbytes)
        say(line, "" if self._number == 1 else self._job.step_name)

    def _describe_step(self) -> None:
        job, parameters = self._job, list(_parameters(self._job.model))
        self._on_gpu = any(x.is_cuda for x in parameters)
        code = getattr(inspect.unwrap(job.train_step), "__code__", None)
        self._out.write(
            "step",
            of=self._number,
            function=job.step_name,
            line=f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "",
            model=_model_name(job.model),
            optimizers=[type(one).__name__ for one in optimizers_of(job.optimizer)],
            num_parameters=sum(x.numel() for x in parameters),
            layout=str(job.layout),
            device="cuda" if self._on_gpu else "cpu",
        )


def _model_name(model: nn.Module) -> str:
    """Its class; of several modules in a dict, list or tuple, the classes of all."""
    several = model.children() if isinstance(model, Models) else [model]
    return ", ".join(type(one).__name__ for one in several)


def _parameters(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def _leads_pipe_rank(job: Job) -> bool:
    """Whether this rank is the first of its pipeline rank."""
    mesh = job.layout.mesh
    if "pipe" not in mesh or job.layout.server:
        return False
    at = mesh.coordinates(int(os.environ.get("RANK", "0")) % mesh.num_ranks)
    return not any(k for axis, k in at.items() if axis != "pipe")
