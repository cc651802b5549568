"""A compiled program for calls with one signature, with the data that a call needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from tutti.calls.guards import Guard, ReadGuard
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.drawn_numbers import Drawn
from tutti.execution.execute import Execution
from tutti.partition.partition import Program
from tutti.serving.worked import Worked

Bound = TypeVar("Bound", bound=Execution | Worked)


@dataclass(eq=False)
class Compiled(Generic[Bound]):
    """A program bound to this rank; each mode has its own subclass.

    Args:
        program: for every rank.
        execution: the same on this one.
        holds: whether the program is valid for the numbers of a call.
        reads: the guard of the tensor values that the step reads.
        measured: the peak memory of a call, in bytes.
        modes: the values of modules' `training` that the step itself has set.
        number: among the programs of its step, from 1.
        last_call: the number of steps before its last call.
        why: what differs from the programs before it; "" for the first one.
    """

    program: Program
    execution: Bound
    holds: Guard
    reads: ReadGuard | None = None
    measured: int | None = field(default=None, kw_only=True)
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list, kw_only=True)
    number: int = field(default=0, kw_only=True)
    last_call: int = field(default=0, kw_only=True)
    why: str = field(default="", kw_only=True)

    @property
    def drawn(self) -> Drawn:
        """The random numbers of the host that a call draws."""
        return self.program.captured.drawn

    def takes(self, given: Mapping[str, float], assumed: Assumed) -> bool:
        """Whether a run takes the branches of this program, by tensor values of another run."""
        return self.reads is None or self.reads.holds(given, assumed.values)

    def may_take(self, given: Mapping[str, float], assumed: Assumed) -> bool:
        """Whether it may take them: those values leave it open."""
        return self.reads is not None and self.reads.may_hold(given, assumed.values)

    @property
    def num_reads(self) -> int:
        """The number of tensor values on which its branches depend."""
        return 0 if self.reads is None else self.reads.num_reads

    def play(
        self, given: Mapping[str, float], tensors: list[Tensor], *, checked: bool
    ) -> list[Any]:
        """One call with its numbers and the tensors of the global batch; its returned leaves.

        If the tensor values that the step reads lead to another branch, the call has no effect.
        """
        raise NotImplementedError

    def explain(self, *, tensor: str | None, graph: bool) -> str:
        """The sharding of tensors, memory and collectives, as text; see `Step.explain`."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What `explain` says, as data for a report: JSON values."""
        raise NotImplementedError

    def memory_facts(self) -> dict[str, Any]:
        """The predicted memory of a call on this rank, as data."""
        raise NotImplementedError
