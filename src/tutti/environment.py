"""Every environment variable of tutti: name, type, default and meaning. No other file reads one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tutti.errors import LayoutError, TuttiError

T = TypeVar("T")

MOST_SECONDS = 1e8  # three years; engines count nanoseconds in 64 bits
_NUMBER = re.compile(r"\s*\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class EnvironmentVariable(Generic[T]):
    """One variable.

    Args:
        name: in the environment.
        default: its value if it is not set.
        meaning: a line for the reference.
        own: whether `tutti run` and `tutti serve` set it for their processes.
    """

    name: str
    default: T
    meaning: str
    own: bool = False

    def read(self, environment: Mapping[str, str] = os.environ) -> T:
        """The value, or the default if the variable is not set.

        Raises:
            TuttiError: the text is not a value of this type; names the variable.
        """
        text = environment.get(self.name)
        return self.default if text is None else self.parse(text)

    def __str__(self) -> str:
        return self.name

    def parse(self, text: str) -> T:
        """The value of `text`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(EnvironmentVariable[str]):
    """Any text; an empty one counts as not set."""

    def parse(self, text: str) -> str:
        return text or self.default


@dataclass(frozen=True)
class Switch(EnvironmentVariable[bool]):
    """On with any text but `0`; an empty one counts as not set."""

    def parse(self, text: str) -> bool:
        return text != "0" if text else self.default


@dataclass(frozen=True)
class Count(EnvironmentVariable[int]):
    """A whole number from 1 of `things`."""

    things: str = ""

    def parse(self, text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise TuttiError(
                f"{self.name}={text} is no number of {self.things}",
                why=f"it gives {self.meaning}",
                fix=f"{self.name}={self.default}, or another number from 1",
            )
        return int(text)


@dataclass(frozen=True)
class Seconds(EnvironmentVariable[float]):
    """A number of seconds, more than 0 unless it may be `zero`."""

    zero: bool = False

    def parse(self, text: str) -> float:
        seconds = float(text) if _NUMBER.fullmatch(text) else -1.0
        if 0 < seconds <= MOST_SECONDS or (self.zero and seconds == 0):
            return seconds
        least = "0" if self.zero else "more than 0"
        raise LayoutError(
            f'{self.name}="{text}" is not a number of seconds',
            why=f"it must be {least} and at most {MOST_SECONDS:g}",
            fix=f"{self.name}={self.default:g}, or leave it unset",
        )


LAYOUT = Text(
    "TUTTI_LAYOUT", "", "the layout of `tutti.distribute` where the script gives none", own=True
)
TIMEOUT = Seconds("TUTTI_TIMEOUT", 600.0, "seconds that a collective waits")
LEASE = Seconds(
    "TUTTI_LEASE", 5.0, "seconds without a sign of life after which a replica or worker is lost"
)
LINGER = Seconds(
    "TUTTI_LINGER",
    1.0,
    "seconds that a server waits for a worker to come back once all have left",
    zero=True,
)
CHECK_NAN = Switch(
    "TUTTI_CHECK_NAN", False, "stop at the first operation that makes NaN or infinity"
)
STRICT = Switch("TUTTI_STRICT", False, "an op without a rule is an error instead of a warning")
WITHOUT = Text("TUTTI_WITHOUT", "", "passes to leave out, with commas")
MOST_PROGRAMS = Count(
    "TUTTI_MOST_PROGRAMS",
    64,
    "how many programs a step keeps, one for each batch of other sizes",
    things="programs",
)
PROFILE = Text(
    "TUTTI_PROFILE", "", "a folder for a trace of each rank: the times of every op of a few calls"
)
HARDWARE = Text(
    "TUTTI_HARDWARE", "", "the folder of this machine's hardware files; else in the user's cache"
)
PLAN = Text("TUTTI_PLAN", "", "the plan that the run follows", own=True)
REPORT = Text(
    "TUTTI_REPORT", "", "a folder for the records of a run, of which `tutti report` makes a page"
)
PREDICTION = Switch(
    "TUTTI_PREDICTION",
    True,
    "print the measured time and memory of a step beside the predicted ones",
)
CUDA_GRAPH = Switch("TUTTI_CUDA_GRAPH", False, "record a step on one GPU as one CUDA graph")
SHARED_MEMORY = Text(
    "TUTTI_SHARED_MEMORY",
    "/dev/shm",  # noqa: S108  # files without a name, mode 0600
    "the file system whose memory ranks of one host share; `off` for none",
)
KEEP_MEMORY = Switch("TUTTI_KEEP_MEMORY", True, "keep freed memory for the next step (glibc)")
SECRET = Text(
    "TUTTI_SECRET",
    "",
    "the secret of workers and servers, and of replicas, on several hosts",
    own=True,
)
TLS = Text("TUTTI_TLS", "", "`certificate,key,authority`: files, for servers and workers")
ROLE = Text("TUTTI_ROLE", "", "`worker 2`, `server 0`, or `worker 2.1`: its second rank", own=True)
SERVERS = Text("TUTTI_SERVERS", "", "`host:port,host:port`: the servers of other hosts", own=True)
LISTEN = Text("TUTTI_LISTEN", "", "`host:port` of a server; else 127.0.0.1, a free port", own=True)
RECORDS = Text("TUTTI_RECORDS", "", "the folder of a server's records", own=True)
REPAIR = Switch(
    "TUTTI_REPAIR", False, "leave damaged records out and go on from those before", own=True
)
RUN_DIR = Text("TUTTI_RUN_DIR", "", "the run's private folder", own=True)

VARIABLES: tuple[
    EnvironmentVariable[str]
    | EnvironmentVariable[bool]
    | EnvironmentVariable[int]
    | EnvironmentVariable[float],
    ...,
] = (
    *(LAYOUT, TIMEOUT, LEASE, LINGER, CHECK_NAN, STRICT, WITHOUT, MOST_PROGRAMS),
    *(PROFILE, HARDWARE, PLAN, REPORT, PREDICTION, CUDA_GRAPH),
    *(SHARED_MEMORY, KEEP_MEMORY, SECRET, TLS, ROLE, SERVERS, LISTEN, RECORDS, REPAIR, RUN_DIR),
)


def check_seconds(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `LayoutError` for the first variable of seconds with an invalid value."""
    for one in (TIMEOUT, LEASE, LINGER):
        one.read(environment)
