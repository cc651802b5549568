"""A process that stands in for a rank of a replica, so that the run outlives it.

The launcher's agent stops all ranks when a process of its own dies. Where replicas can go on without one,
what it starts only waits for the process that runs the script:

    agent --- stand-in --- rank 0          rank 2 is killed: its stand-in notes it, and ends well
          +-- stand-in --- rank 1
          +-- stand-in --- rank 2 (dead)

Both are in one process group, so what the agent sends to one reaches both. This must stay light: nothing of
torch is imported before the fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from tutti.environment import LAYOUT
from tutti.launch.records import Failure, Lost, ReplicaJoined, read_record, write_record

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """No process outlives the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stand_in(rank: int, run_dir: Path) -> None:
    """Return in a new process where the layout has replicas; the old one waits, and ends as that does.

    If the rank is lost once its replica has joined the others, the old process notes that and ends well.
    """
    layout = LAYOUT.read()
    if "replica=" not in layout or "server=" in layout:  # `supervise` starts what has servers
        return
    pid = os.fork()
    if not pid:
        die_with_parent()
        return
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    joined = read_record(run_dir, ReplicaJoined, rank)
    if joined is not None and _is_lost(code, read_record(run_dir, Failure, rank)):
        write_record(run_dir, Lost(rank, joined.replica, code))
        os._exit(0)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_lost(code: int, failure: Failure | None) -> bool:
    """Whether a rank was killed, or lost others of its replica; a mistake of the script ends the run."""
    if code < 0:
        return -code not in _SIGNALS
    return failure is not None and failure.is_comm
