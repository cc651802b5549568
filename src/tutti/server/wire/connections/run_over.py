"""A run that goes on no more, for this worker or for all: whoever asks its servers hears so at once."""

from __future__ import annotations

from collections.abc import Mapping

from tutti.errors import CommError


class RunOverError(CommError):
    """The servers have ended, or have lost a worker that they cannot do without."""


def lost(workers: list[int], silent: Mapping[int, float], lease_seconds: float) -> RunOverError:
    """The error of a server under `step` whose workers have vanished.

    Args:
        workers: those that have closed their connections.
        silent: seconds since the last request of each silent worker, most first. Those that
            left after it may have waited for the first one in vain.
    """
    first = next(iter(silent))
    if first not in workers:
        left = f"{_named(workers)} left meanwhile"
        return told(f"nothing came from worker {first} for {silent[first]:.0f} s, and {left}")
    verb = "is" if len(workers) == 1 else "are"
    return told(
        f"{_named(workers)} {verb} lost: the connection was closed, and not opened again within "
        f"{lease_seconds:g} s"
    )


def _named(workers: list[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


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
