"""The ways that a capture tries after an error: an assumed value may have led to it."""

from __future__ import annotations

from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_values import Symbols
from tutti.errors import CaptureError, TuttiError

_MOST = 8  # without a read after those of all other ways


class OtherWays:
    """What the traces of one capture have tried."""

    def __init__(self) -> None:
        self._tried = self._furthest = 0
        self._refused: dict[str, CaptureError] = {}

    def after(self, error: BaseException, symbols: Symbols) -> Assumed | None:
        """The values for a trace after one that ended with `error`; None if no other can help.

        A refusal counts if the other way does not lead past it.
        """
        if isinstance(error, TuttiError):
            if type(error) is not CaptureError or str(error) in self._refused:
                return None
            self._refused[str(error)] = error
        divided = isinstance(error, ArithmeticError)
        other = (symbols.generic() if divided else None) or symbols.flipped()
        num_reads = len(symbols.reads)
        self._tried = self._tried + 1 if num_reads <= self._furthest else 0
        self._furthest = max(self._furthest, num_reads)
        return other if self._tried < _MOST else None

    def reason(self, error: BaseException) -> BaseException:
        """The error to raise after the last one: the first refusal, if there was one."""
        return next(iter(self._refused.values()), error)
