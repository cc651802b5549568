"""A program that plays calls like one another, with what a call needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from tutti.calls.guards import Guard, ReadGuard
from tutti.capture.python.read_values import Seen
from tutti.execution.execute import Execution
from tutti.partition.partition import Program
from tutti.serving.worked import Worked

Bound = TypeVar("Bound", bound=Execution | Worked)


@dataclass(eq=False)
class Compiled(Generic[Bound]):
    """A program bound to this rank; each mode has a kind of its own.

    Args:
        program: for every rank.
        execution: the same on this one.
        holds: whether the program is right for the numbers of a call.
        reads: where the step reads values of tensors.
        measured: the most memory that a call took, in bytes.
        modes: what the step itself has set of modules' `training`.
        number: of the programs of its step, from 1.
        last_call: how many steps there were before its last call.
    """

    program: Program
    execution: Bound
    holds: Guard
    reads: ReadGuard | None = None
    measured: int | None = field(default=None, kw_only=True)
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list, kw_only=True)
    number: int = field(default=0, kw_only=True)
    last_call: int = field(default=0, kw_only=True)

    def may_hold(self, given: Mapping[str, float], seen: Seen) -> bool:
        """Whether a run may go the ways of this program, by what another run has `seen` of tensors."""
        return self.reads is None or self.reads.holds(given, seen)

    def play(
        self, given: Mapping[str, float], tensors: list[Tensor], *, checked: bool
    ) -> list[Any]:
        """One call with its numbers and the tensors of the global batch; the leaves that it returns.

        Where the values that the step reads from tensors lead another way, nothing of the call counts.
        """
        raise NotImplementedError

    def explain(self, *, tensor: str | None, graph: bool) -> str:
        """Where tensors live, memory and collectives, as text; `Step.explain` says more."""
        raise NotImplementedError
