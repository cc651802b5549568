"""Who reads a value of a tensor in a trace, where it is a tool of PyTorch in place of the step itself."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class ValueReader:
    """A tool whose branch depends on values of tensors, and a step without it."""

    name: str = "the step"
    way_out: str = ""


THE_STEP = ValueReader()
READER: ContextVar[ValueReader] = ContextVar("reader", default=THE_STEP)
