"""The error of a rank that does not meet the others at the start of a run: what prevents it, and a fix."""

from __future__ import annotations

import os
import resource

from tutti.comm.collectives.failure import named_ranks, reason_of
from tutti.comm.collectives.group import collective_timeout
from tutti.errors import CommError
from tutti.launch.interface import without_address

# Of the system, and of Python, where a process starts a thread.
_NO_THREAD = ("Resource temporarily unavailable", "can't start new thread")


def no_answer(rank: int, seconds: float) -> CommError:
    """What listens at the address of the store accepts connections, and says nothing."""
    return CommError(
        f"rank {rank} got no answer from the store of the run at {_address()} within {seconds:g} s",
        why="rank 0 or torchrun's agent keeps the store; another program may hold its port",
        fix="see that rank 0 lives; if another program listens there, set another MASTER_PORT on all ranks",
    )


def not_met(error: RuntimeError, rank: int, missing: list[int]) -> CommError:
    """The error for `error` of the engine or of its store.

    Args:
        missing: the ranks that have not come, as far as known.
    """
    reason = reason_of(error)
    if found := without_address(str(error)):
        return CommError(
            f"rank {rank} cannot meet the other ranks: {found[0]}",
            why="ranks reach each other by the interface that GLOO_SOCKET_IFNAME names, also on one host",
            fix=found[1],
        )
    if "EADDRINUSE" in reason:
        return CommError(
            f"rank {rank} cannot open the store of the run at {_address()}",
            why="another program, or another run on this host, listens at that port",
            fix="another MASTER_PORT, the same on all ranks",
        )
    if reason in _NO_THREAD:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        now = "" if limit == resource.RLIM_INFINITY else f" (now {limit})"
        return CommError(
            f"rank {rank} cannot start a thread to meet the other ranks",
            why=f"{reason}: this user, or this container, may have no more processes and threads",
            fix=f"raise `ulimit -u`{now}, or the container's limit of processes",
        )
    if missing:
        seconds = collective_timeout().total_seconds()
        return CommError(
            f"{named_ranks(missing)} did not come to rank {rank} at the start within {seconds:g} s",
            why=reason,
            fix="if a rank is only slow, set TUTTI_TIMEOUT to more seconds",
        )
    return CommError(
        f"rank {rank} cannot meet the other ranks at the start of the run",
        why=reason,
        fix="see that all ranks live, and reach each other by the interface that GLOO_SOCKET_IFNAME names",
    )


def _address() -> str:
    return ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
