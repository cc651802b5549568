"""The errors of a collective that cannot finish."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.host.signals import PeerDiffers, PeerLate, PeerLost
from tutti.errors import CommError
from tutti.quantities import format_nbytes

_PEER_LEFT = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|connection (was )?closed"
    r"|connection refused|recvvalue failed|sendbytes failed|remote process exited",
    re.IGNORECASE,
)
_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|cu|h):\d+\]\s*")  # of an engine's source
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_LATE = "the wait has timed out"


class Wait(NamedTuple):
    """A collective in progress on a rank: its name, axes, payload and start (monotonic)."""

    name: str
    axes: tuple[str, ...]
    nbytes: int
    began_seconds: float

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        return f"{self.name} over {axes} ({format_nbytes(self.nbytes)})" if axes else self.name


def waiting(name: str, edge: tuple[int, int], nbytes: int) -> Wait:
    """A message between two ranks that begins now: `waiting("recv", (0, 1), 8)`."""
    return Wait(name, (f"{edge[0]} -> {edge[1]}",), nbytes, now_seconds())


def lost_peer(message: str) -> bool:
    """Whether a transport's error message reports a closed connection."""
    return _PEER_LEFT.search(message) is not None


def late_peer(message: str) -> bool:
    """Whether a transport's error message reports a wait beyond its limit."""
    return _TIMED_OUT.search(message) is not None


def comm_error(
    exc: BaseException, name: str, axes: tuple[str, ...], nbytes: int, group: Group
) -> CommError:
    """The `CommError` for a collective that raised `exc`: waiting rank, collective, missing ranks.

    A group of two knows which rank is gone; a larger one names the candidates. `tutti run` sees
    every rank's end and names it in its report. `with_line` adds the line of the user's program.
    """
    message, reason = str(exc).strip(), reason_of(exc)
    peers = [rank for i, rank in enumerate(group.ranks) if i != group.position]
    if isinstance(exc, PeerLost | PeerLate | PeerDiffers):  # these know which
        peers = list(exc.ranks)
    waiting = f"rank {group.ranks[group.position]} in {Wait(name, axes, nbytes, 0.0)}"
    if isinstance(exc, PeerDiffers):
        return CommError(
            f"{named_ranks(peers)} came to another collective than {waiting}",
            why=reason,
            fix="give every rank the same model, batch shapes and layout",
        )
    if lost_peer(message):
        sure = len(peers) == 1 or isinstance(exc, PeerLost)
        gone = f"{named_ranks(peers)} {'is' if len(peers) == 1 else 'are'} gone"
        gone = gone if sure else f"one of {named_ranks(peers)} is gone"
        return CommError(f"{gone}; it left {waiting}", why=reason)
    if late_peer(message):
        seconds = collective_timeout().total_seconds()
        return CommError(
            f"{named_ranks(peers)} did not join {waiting} within {seconds:g} s",
            why=reason if isinstance(exc, PeerLate) else _LATE,
            fix="if a rank is only slow, set TUTTI_TIMEOUT to more seconds",
        )
    return CommError(f"{waiting} failed", why=reason)


def reason_of(exc: BaseException) -> str:
    """The first line of an engine's message, without the place in its source and its advice."""
    message = _PLACE.sub("", str(exc).strip())
    return message.splitlines()[0].split(". This is typically")[0] if message else repr(exc)


@contextmanager
def naming(name: str, axes: tuple[str, ...], nbytes: int, group: Group) -> Iterator[None]:
    """Turn the transport's errors into the `CommError` for this collective.

    An out-of-memory error passes unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as exc:
        raise comm_error(exc, name, axes, nbytes, group) from exc


def with_line(error: CommError, line: str) -> CommError:
    """The same error with the waiting line of the user's program, such as "train.py:12"."""
    return CommError(error.what, at=line, why=error.why, fix=error.fix)


def without_frames(error: CommError) -> CommError:
    """The same error without the frames that raised it: they keep a dropped group alive, whose connections
    close with its end, and other ranks wait in it until then."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def called_alone(error: CommError, why: str, line: str = "") -> CommError:
    """The error for a rank that waits in a call that all ranks make, where others do not come.

    Args:
        error: of the wait; one with another reason is returned as it is.
        why: such as "all ranks save and load together".
        line: of the user's program.
    """
    if not late_peer(error.why):
        return error
    fix = "call it on every rank: take it out of `if rank == 0:`"
    return CommError(error.what, at=line, why=why, fix=f"{fix}; {error.fix}")


def now_seconds() -> float:
    """The clock of `Wait.began_seconds`."""
    return time.monotonic()


def named_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1", "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
