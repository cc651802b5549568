"""A stand-in process for a rank of a replica, so that the run survives the rank's loss.

The launcher's agent stops all ranks when one of its child processes dies. If replicas can continue without
one, the child only waits for the process that runs the script:

    agent --- stand-in --- rank 0          rank 2 is killed: its stand-in notes it, and ends well
          +-- stand-in --- rank 1
          +-- stand-in --- rank 2 (dead)

Both are in one process group, so the agent's signals reach both. This must stay light: it imports nothing of
torch before the fork.
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
    """End this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stand_in(rank: int, run_dir: Path) -> None:
    """With replicas in the layout, return in a new process; the old one waits, and ends like the new one.

    If the rank is lost once its replica has joined the others, the old process notes that and ends well.
    """
    layout = LAYOUT.read()
    if "replica=" not in layout or "server=" in layout:  # `supervise` starts runs with servers
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
    """Whether a rank was killed, or lost others of its replica; an error of the script ends the run."""
    if code < 0:
        return -code not in _SIGNALS
    return failure is not None and failure.is_comm
