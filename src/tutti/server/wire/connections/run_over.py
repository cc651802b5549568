"""A run that goes on no more, for this worker or for all: whoever asks its servers hears so at once."""

from __future__ import annotations

from tutti.errors import CommError


class RunOverError(CommError):
    """The servers have ended, or have lost a worker that they cannot do without."""


def lost(workers: list[int], lease_seconds: float) -> RunOverError:
    """The error of a server under `step` whose workers have vanished."""
    names = ", ".join(map(str, workers))
    who = f"worker {names} is lost" if len(workers) == 1 else f"workers {names} are lost"
    return told(
        f"{who}: the connection was closed, and not opened again within {lease_seconds:g} s"
    )


def told(what: str) -> RunOverError:
    """The same error on the workers, by its first line."""
    return RunOverError(
        what,
        why="under sync=step an update needs the rows of every worker",
        fix="start the run again from its last checkpoint, or sync=async",
    )


def ended(server: int, silence: str) -> RunOverError:
    """The error of a worker whose server has ended; `silence`: why the others went on, if known."""
    return RunOverError(
        f"server {server} has ended, since no worker was left{f': {silence}' if silence else ''}",
        why="servers end once every worker has left, or has been silent for its lease",
        fix="if a process is stopped now and then, set TUTTI_LEASE to more seconds",
    )
