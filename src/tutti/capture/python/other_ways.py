"""The ways that a capture tries after an error: an assumed value may have led to it."""

from __future__ import annotations

from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_values import Symbols
from tutti.errors import CaptureError, TuttiError

# A guessed number may lead to a division by zero, a logarithm of zero, a power that is complex.
_OF_NUMBERS = (ArithmeticError, ValueError, TypeError)
_MOST = 8  # without a line of a read after those of all other ways


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
        other = (symbols.generic() if isinstance(error, _OF_NUMBERS) else None) or symbols.flipped()
        # A loop that goes on does not lead past an error.
        lines = len({site for site, _ in symbols.places})
        self._tried = self._tried + 1 if lines <= self._furthest else 0
        self._furthest = max(self._furthest, lines)
        return other if self._tried < _MOST else None

    def reason(self, error: BaseException) -> BaseException:
        """The error to raise after the last one: the first refusal, if there was one."""
        return next(iter(self._refused.values()), error)
