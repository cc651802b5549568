"""No rank outlives its run: a thread of the launcher ends what the agent cannot stop in time."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tutti.runtime.records import Exit, Lost, read_record

STOP_SECONDS = 10.0
POLL_SECONDS = 0.2


def note_pid(run_dir: Path, rank: int) -> None:
    """Tell the launcher which process is `rank`."""
    (run_dir / f"rank{rank}.pid").write_text(str(os.getpid()))


class Guard:
    """Watches the ranks' processes, children of this one, each the head of its own process group.

    A rank that another one's death leaves stuck, deaf to SIGTERM, is killed after `STOP_SECONDS`;
    the agent itself would give it 30. On leaving, whatever is left of any rank's group is killed. Without
    `watch` only that: ranks may outlive each other.
    """

    def __init__(self, run_dir: Path, num_ranks: int, *, watch: bool = True) -> None:
        self._watches = watch
        self._run_dir, self._num_ranks = run_dir, num_ranks
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tutti-guard", daemon=True)

    def __enter__(self) -> Guard:
        if self._watches:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._watches:
            self._thread.join()
        for pid in self._pids().values():
            if _is_rank(pid) or not Path(f"/proc/{pid}").exists():
                _kill_group(pid)

    def _pids(self) -> dict[int, int]:
        pids = {}
        for rank in range(self._num_ranks):
            path = self._run_dir / f"rank{rank}.pid"
            text = path.read_text() if path.exists() else ""
            if text:
                pids[rank] = int(text)
        return pids

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            if self._one_failed():
                break
        if self._done.wait(STOP_SECONDS):
            return
        for pid in self._pids().values():
            if _is_rank(pid):
                _kill_group(pid)

    def _one_failed(self) -> bool:
        return any(
            not _is_rank(pid) and not self._ended_well(rank) for rank, pid in self._pids().items()
        )

    def _ended_well(self, rank: int) -> bool:
        ended = read_record(self._run_dir, Exit, rank)
        lost = read_record(self._run_dir, Lost, rank)
        return lost is not None or (ended is not None and ended.code == 0)


def _is_rank(pid: int) -> bool:
    """Whether `pid` is a living child of this process that heads its own group."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state, parent, group = fields[0], int(fields[1]), int(fields[2])
    return state != "Z" and parent == os.getpid() and group == pid


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
