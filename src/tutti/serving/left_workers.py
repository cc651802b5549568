"""Has the launcher name each worker without which the others go on: it has left, or has been silent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.comm.host.life import state_of
from tutti.environment import LEASE, RUN_DIR
from tutti.launch.records import read_script
from tutti.launch.roles import WORKER, Role
from tutti.launch.telling import tell
from tutti.layout import Layout

_FEWER_ROWS = (
    "has left: the others go on without its rows of each batch, and servers scale their sums"
)


class LeftWorkers:
    """A server's lines about workers, each told once.

    Every server notes the workers that have left steps together, in the same words, which the launcher prints
    once. Only the first server tells of silence: another one may count from another moment.
    """

    def __init__(self, role: Role, layout: Layout) -> None:
        self._is_first, self._layout = role.number == 0, layout
        self._missed, self._silent = set[int](), set[int]()

    def tell(self, missed: Sequence[int], lapsed: Mapping[int, tuple[str, float]]) -> None:
        """Name the workers that are new.

        Args:
            missed: have left before an update that the others made together.
            lapsed: have been silent for their lease: the last address, "" if unknown, and the seconds.
        """
        for worker in missed:
            if worker not in self._missed and RUN_DIR.read():
                tell(f"worker {worker} {_FEWER_ROWS}")
        self._missed.update(missed)
        for worker, (address, seconds) in lapsed.items():
            if worker not in self._silent and self._is_first:
                self._tell_silence(worker, address, seconds)
        self._silent.update(lapsed)

    def _tell_silence(self, worker: int, address: str, seconds: float) -> None:
        role = Role(WORKER, worker)
        rank, run_dir = role.rank(self._layout), RUN_DIR.read()
        process = read_script(Path(run_dir), rank) if run_dir else None
        state = state_of(process) if process is not None else "?"
        if state in ("", "Z", "X"):
            return  # the launcher of this host has named its end
        where = f"rank {rank}" + (f" at {address}" if address and process is None else "")
        stopped = f", process {process} is stopped" if state in ("T", "t") else ""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        tell(
            f"{role} ({where}{stopped}) has been silent since {since}, longer than its lease of "
            f"{LEASE.read():g} s: the others go on without it"
        )
