"""The ranks of `tutti run` come to their store before they connect: one that has ended never comes.

An engine's own start waits for the addresses of all until its limit, whether or not they live.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tutti.comm.collectives.failure import Wait, named_ranks, now_seconds
from tutti.comm.collectives.group import collective_timeout
from tutti.comm.host.awake import AwakeClock
from tutti.comm.host.life import state_of
from tutti.comm.host.signals import PeerLost
from tutti.errors import CommError
from tutti.launch.records import read_script

POLL_SECONDS = 0.02
# As torch.distributed names the call; the other ranks are in it.
_CALL = "init_process_group"


def here(rank: int) -> str:
    """The key by which a rank notes in the store that it has come."""
    return f"here/{rank}"


class Gathering:
    """The wait of a rank until all others have come.

    Args:
        store: of the ranks.
        run_dir: that of `tutti run`, where each rank has noted its process.
        rank: in the process group; `first` is the run's rank of its rank 0, and `size` the number of its
            ranks.
    """

    def __init__(self, store: Any, run_dir: Path, rank: int, *, first: int, size: int) -> None:
        self._store, self._run_dir, self._rank, self._first = store, run_dir, rank, first
        self.current = Wait(_CALL, (), 0, now_seconds())
        self.missing = self._absent(tuple(range(size)))

    def wait(self) -> None:
        """Return once all have come.

        Raises:
            CommError: a missing one has ended, or did not come within `TUTTI_TIMEOUT`.
        """
        clock, most = AwakeClock(), collective_timeout().total_seconds()
        while self.missing:
            ended = tuple(rank for rank in self.missing if self._has_ended(rank))
            if gone := self._absent(ended):  # one may have come, and ended since
                raise self._lost(gone) from PeerLost(gone)
            if clock.look() > most:
                raise self._late(most)
            time.sleep(POLL_SECONDS)
            self.missing = self._absent(self.missing)

    def _absent(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._store.check([here(rank)]))

    def _has_ended(self, rank: int) -> bool:
        pid = read_script(self._run_dir, self._first + rank)
        return pid is not None and state_of(pid) in ("", "Z", "X")

    def _lost(self, gone: tuple[int, ...]) -> CommError:
        are = "is" if len(gone) == 1 else "are"
        left = "it left" if len(gone) == 1 else "they left"
        return CommError(
            f"{named_ranks(gone)} {are} gone; {left} rank {self._rank} in {_CALL}",
            why=str(PeerLost(gone)),
        )

    def _late(self, seconds: float) -> CommError:
        missing = named_ranks(self.missing)
        return CommError(
            f"{missing} did not come to rank {self._rank} at the start within {seconds:g} s",
            why="all ranks of a run meet before its first step",
            fix="if a rank is only slow, set TUTTI_TIMEOUT to more seconds",
        )
