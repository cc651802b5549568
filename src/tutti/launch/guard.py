"""No rank outlives its run: a thread of the launcher ends ranks that the agent cannot stop in time."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from tutti.comm.collectives.group import collective_timeout
from tutti.comm.host.awake import AwakeClock
from tutti.comm.host.life import stat_of, state_of
from tutti.launch.memory_kills import MemoryKills
from tutti.launch.records import Exit, GivenUp, Lost, Waited, read_pid, read_record, read_script
from tutti.launch.telling import ToldLines

STOP_SECONDS = 10.0
POLL_SECONDS = 0.2
# How long after its stop a rank is killed once the others have the order to end.
TOLD_SECONDS = 1.0
# The least time between two reports of waits for the same ranks.
QUIET_SECONDS = 60.0
# Beyond `TUTTI_TIMEOUT`: ranks that wait for a stopped one report it first.
STOPPED_SECONDS = 5.0


@dataclass(frozen=True)
class Seen:
    """The launcher's observations of a rank's process, and its actions; times are monotonic.

    Args:
        ended: when the process ended; None while it lives.
        stopped: since when it is stopped (SIGSTOP), or was when it ended.
        killed: whether the launcher has sent it a SIGKILL.
        shortage: for a SIGKILL from elsewhere, the kernel's report of a lack of memory.
        code: its exit code, minus a signal's number if that killed it; None if another has read it first.
    """

    ended: float | None = None
    stopped: float | None = None
    killed: bool = False
    shortage: str = ""
    code: int | None = None

    @property
    def seconds(self) -> float | None:
        """The time of the rank's loss."""
        return self.ended if self.stopped is None else self.stopped


class Guard:
    """Watches the ranks' processes, children of this one, each the head of its own process group.

    It notes the end and the stops of each. After `STOP_SECONDS` it kills a rank that hangs after another
    one's death and ignores SIGTERM; the agent itself would give it 30. It also kills a rank that has been
    stopped (SIGSTOP) for `TUTTI_TIMEOUT` and `STOPPED_SECONDS` more, or, once the others have given it up,
    for `TOLD_SECONDS`: it may hold resources that they need. At its end it kills the rest of every rank's
    group. Without `ends_others` ranks may outlive each other. It prints what ranks tell (`telling.py`).
    """

    def __init__(self, run_dir: Path, num_ranks: int, *, ends_others: bool = True) -> None:
        self._ends_others = ends_others
        self._run_dir, self._num_ranks = run_dir, num_ranks
        self._shortage = MemoryKills()
        self._most_stopped = collective_timeout().total_seconds() + STOPPED_SECONDS
        self._clock = AwakeClock(5 * POLL_SECONDS)
        self._seen: dict[int, Seen] = {}
        self._pids: dict[int, int] = {}
        self._fds: dict[int, int] = {}  # by rank
        self._stopped_since: dict[int, float] = {}  # by the clock without suspensions
        self._lines = ToldLines(run_dir, num_ranks)
        self._told: dict[int, int] = {}  # by rank: the last of its waits that the guard has printed
        self._told_of: dict[tuple[int, ...], float] = {}  # by late ranks: when
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tutti-guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look(0.0)
        self._lines.show()
        for rank, pid in self._pids.items():
            if _is_rank(pid):
                self.kill(rank)
            elif not Path(f"/proc/{pid}").exists():
                _kill_group(pid)
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def seen(self, rank: int) -> Seen:
        """The observations of a rank."""
        with self._lock:
            found = self._seen.get(rank, Seen())
        return found if found.killed else replace(found, shortage=self._shortage.said())

    def kill(self, rank: int, *, alone: bool = False) -> None:
        """Kill a rank and all of its group, and note it.

        With `alone` a stand-in process of the rank ends by itself.
        """
        self._look(0.0)
        with self._lock:
            found = self._seen.get(rank, Seen())
            if found.ended is None and rank in self._pids:
                self._seen[rank] = replace(found, killed=True)
                script = read_script(self._run_dir, rank)
                if alone and script not in (None, self._pids[rank]):
                    with suppress(ProcessLookupError):
                        os.kill(script, signal.SIGKILL)
                else:
                    _kill_group(self._pids[rank])

    def _watch(self) -> None:
        failed_at: float | None = None
        while not self._done.is_set():
            self._look(POLL_SECONDS)
            now = time.monotonic()
            if failed_at is None and self._ends_others and self._one_failed():
                failed_at = now
            if failed_at is not None and now - failed_at > STOP_SECONDS:
                for rank in list(self._pids):
                    self.kill(rank)
                return
            # A stopped rank cannot handle SIGTERM.
            self._tell_waits()
            self._lines.show()
            self._end_stopped(self._most_stopped if failed_at is None else TOLD_SECONDS)

    def _look(self, seconds: float) -> None:
        """Note the ranks that end within this number of seconds, and the stopped ones."""
        with self._lock:
            self._read_pids()
            watched = {fd: rank for rank, fd in self._fds.items()}
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ended = poll.poll(seconds * 1000)
        with self._lock:
            for fd, _ in ended:
                rank = watched[fd]
                if self._fds.get(rank) != fd:  # another thread has noted it
                    continue
                found = self._seen.get(rank, Seen())
                self._seen[rank] = replace(found, ended=time.monotonic(), code=_exit_code(fd))
                os.close(self._fds.pop(rank))
            for rank in self._fds:
                self._note_stopped(rank)

    def _read_pids(self) -> None:
        for rank in range(self._num_ranks):
            pid = read_pid(self._run_dir, rank)
            if pid is None or pid == self._pids.get(rank):
                continue
            self._pids[rank] = pid  # a restarted server has a new one
            if rank in self._fds:
                os.close(self._fds.pop(rank))
            self._seen[rank] = Seen()
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except OSError:
                self._seen[rank] = Seen(ended=time.monotonic())

    def _note_stopped(self, rank: int) -> None:
        found = self._seen.get(rank, Seen())
        if found.ended is not None or found.killed or rank not in self._pids:
            return
        script = read_script(self._run_dir, rank)
        states = {state_of(pid) for pid in {self._pids[rank], script or self._pids[rank]}}
        if "T" in states and found.stopped is None:
            self._seen[rank] = replace(found, stopped=time.monotonic())
            self._stopped_since[rank] = self._clock.look()
        elif not states & {"T", "Z", ""} and found.stopped is not None:  # it has resumed
            self._seen[rank] = replace(found, stopped=None)

    def _end_stopped(self, most_seconds: float) -> None:
        now = self._clock.look()
        for rank, found in list(self._seen.items()):
            lives = found.ended is None and not found.killed and found.stopped is not None
            given_up = lives and read_record(self._run_dir, GivenUp, rank) is not None
            most = TOLD_SECONDS if given_up else most_seconds
            if lives and now - self._stopped_since[rank] > most:
                self.kill(rank, alone=True)

    def _tell_waits(self) -> None:
        """Print the ranks' reports of unusually long waits, once if several wait for the same ranks."""
        for rank in range(self._num_ranks):
            found = read_record(self._run_dir, Waited, rank)
            if found is None or found.number == self._told.get(rank):
                continue
            self._told[rank] = found.number
            late, now = tuple(found.late), time.monotonic()
            if now - self._told_of.get(late, -QUIET_SECONDS) >= QUIET_SECONDS:
                self._told_of[late] = now
                print(found.text, file=sys.stderr, flush=True)

    def _one_failed(self) -> bool:
        return any(
            found.ended is not None and not self._ended_well(rank)
            for rank, found in list(self._seen.items())
        )

    def _ended_well(self, rank: int) -> bool:
        ended = read_record(self._run_dir, Exit, rank)
        lost = read_record(self._run_dir, Lost, rank)
        return lost is not None or (ended is not None and ended.code == 0)


def _is_rank(pid: int) -> bool:
    """Whether `pid` is a living child of this process that heads its own group."""
    fields = stat_of(pid)
    if not fields:
        return False
    state, parent, group = fields[0], int(fields[1]), int(fields[2])
    return state != "Z" and parent == os.getpid() and group == pid


def _exit_code(fd: int) -> int | None:
    """The exit code of an ended child, by its pidfd; its parent code can still read it."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return None


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
