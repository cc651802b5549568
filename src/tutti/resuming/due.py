"""When the next save is due: by the number of steps, or by time."""

from __future__ import annotations

import re
import time

from tutti.environment import MOST_SECONDS
from tutti.errors import TuttiError

_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")
_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}


class Due:
    """The rhythm of saves.

    Args:
        every: a number of steps, a time such as "10 min", or None for no such saves.

    Raises:
        TuttiError: `every` is neither.
    """

    def __init__(self, every: int | str | None) -> None:
        self._steps, self._seconds = 0, 0.0
        if isinstance(every, str):
            self._seconds = _seconds(every)
        elif every is not None:
            if type(every) is not int or every < 1:
                raise _refusal(every)
            self._steps = every
        self._step = 0
        self._since = time.monotonic()

    def begin(self, step: int) -> None:
        """Count from this step, and from now."""
        self._step, self._since = step, time.monotonic()

    def by_steps(self, step: int) -> bool:
        """Whether a multiple of `every` lies after the last step asked about, up to this one."""
        before, self._step = self._step, step
        return self._steps > 0 and step // self._steps > before // self._steps

    def by_time(self) -> bool:
        """Whether the time since `begin` or the last `saved` is over."""
        return self._seconds > 0 and time.monotonic() - self._since >= self._seconds

    def saved(self) -> None:
        """Count the time anew."""
        self._since = time.monotonic()


def _seconds(text: str) -> float:
    found = _TEXT.fullmatch(text.lower())
    if found is None or found[2] not in _UNITS:
        raise _refusal(text)
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= MOST_SECONDS:
        raise _refusal(text)
    return seconds


def _refusal(every: object) -> TuttiError:
    return TuttiError(
        f"every={every!r} is neither a number of steps nor a time",
        fix='every=100, or every="10 min" (units s, min, h)',
    )
