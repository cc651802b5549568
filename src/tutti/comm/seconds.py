"""Seconds that environment variables give: a number, or an error that names the variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from tutti.errors import LayoutError

MOST_SECONDS = 1e8  # three years; engines count nanoseconds in 64 bits
_NUMBER = re.compile(r"\s*\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE | re.ASCII)


class Seconds(NamedTuple):
    """A variable, its default, and whether it may be 0."""

    name: str
    default: float
    zero: bool = False

    def read(self, environment: Mapping[str, str] = os.environ) -> float:
        """The seconds that the variable gives, or the default where it is not set.

        Raises:
            LayoutError: it is set to anything but a number of seconds up to `MOST_SECONDS`.
        """
        text = environment.get(self.name)
        if text is None:
            return self.default
        seconds = float(text) if _NUMBER.fullmatch(text) else -1.0
        if 0 < seconds <= MOST_SECONDS or (self.zero and seconds == 0):
            return seconds
        least = "0" if self.zero else "more than 0"
        raise LayoutError(
            f'{self.name}="{text}" is not a number of seconds',
            why=f"it must be {least} and at most {MOST_SECONDS:g}",
            fix=f"{self.name}={self.default:g}, or leave it unset",
        )


TIMEOUT = Seconds("TUTTI_TIMEOUT", 600.0)  # that a collective waits
LEASE = Seconds("TUTTI_LEASE", 5.0)  # without a sign of life after which a replica is lost
LINGER = Seconds("TUTTI_LINGER", 1.0, zero=True)  # that a server waits once all workers have left


def check_seconds(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `LayoutError` for the first of these variables that gives no seconds."""
    for one in (TIMEOUT, LEASE, LINGER):
        one.read(environment)
