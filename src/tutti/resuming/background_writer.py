"""Writes a rank's saves while it trains: copies its share, and hands the copies to a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

from torch import Tensor

from tutti.checkpoint.unanimous import error_of
from tutti.errors import CheckpointError
from tutti.resuming import writer_process
from tutti.resuming.rendezvous import Rendezvous
from tutti.resuming.staging import Copy, Staging

# After the last save of a run: its process has nothing left to do.
_END_SECONDS = 10.0


class BackgroundWriter:
    """The writing process of one rank, and the memory that both share. One save at a time.

    Args:
        rendezvous: of the processes of all ranks.
        position: of this rank among them.
        lock: the descriptor of the folder's lock, which the process then holds, too; -1 for none.
    """

    def __init__(self, rendezvous: Rendezvous, position: int, lock: int) -> None:
        self._rendezvous, self._position, self._lock = rendezvous, position, lock
        self._staging = Staging()
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self.writing = False
        _OPEN.add(self)

    def reserve(self, nbytes: int) -> None:
        """Take memory for copies of so many bytes. Raises `OSError`."""
        self._staging.reserve(nbytes)

    def begin(
        self, number: int, parts: Sequence[Tensor], copies: Sequence[Copy], text: str
    ) -> None:
        """Copy `parts` and have them written as save `number`; returns without waiting for the process.

        Args:
            text: of the `StagedSave`.

        Raises:
            OSError: there is no memory for the copies, or the process cannot start.
        """
        assert not self.writing
        said = text.encode()
        begin = max((one.end for one in copies), default=0)
        self._staging.reserve(begin + len(said))
        self._staging.copy(parts, copies)
        self._staging.put(begin, said)
        process = self._started()
        line = json.dumps({"number": number, "begin": begin, "nbytes": len(said)}) + "\n"
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `outcome` says how it ended
            process.stdin.write(line.encode())
            process.stdin.flush()
        self._heard, self.writing = b"", True

    def outcome(self, what: str, *, wait: bool) -> Sequence[str] | None:
        """Whether the save in progress has ended: its warnings; None if not.

        Args:
            what: a description of a failure, if the process does not give one.

        Raises:
            CheckpointError: it failed. The next one begins anew.
        """
        process = self._process
        assert self.writing and process is not None and process.stdout is not None
        while not self._heard.endswith(b"\n"):
            if not wait and not select.select([process.stdout], [], [], 0)[0]:
                return None
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                code = process.wait()
                self.abort()
                ended = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise CheckpointError(
                    what,
                    why=f"the process that writes saves ended ({ended})",
                    fix="read its own error above; a signal 9 is often a lack of memory",
                )
            self._heard += piece
        self.writing = False
        said = json.loads(self._heard)
        if said["error"] is not None:
            raise error_of(said["error"])
        return said["warnings"]

    def abort(self) -> None:
        """Give up the save in progress, which others of the run cannot finish. The memory stays."""
        process, self._process, self.writing = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            _close(process.stdin, process.stdout)

    def close(self) -> None:
        """End the process, which writes nothing, and give the memory back."""
        _OPEN.discard(self)
        process, self._process = self._process, None
        if process is not None:
            _close(process.stdin)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process.stdout)
        self._staging.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            fd = self._staging.fd
            command = [sys.executable, "-P", "-m", writer_process.__name__]
            with _ending_signals_blocked():
                self._process = subprocess.Popen(  # noqa: S603  # our own module and arguments
                    [*command, str(fd), self._rendezvous.text(), str(self._position)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(fd,) if self._lock < 0 else (fd, self._lock),
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
        return self._process


@contextlib.contextmanager
def _ending_signals_blocked() -> Iterator[None]:
    """A process that starts inside has them blocked: they cannot end it before it ignores them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, writer_process.ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(*streams: IO[bytes] | None) -> None:
    for one in streams:
        if one is not None:
            with contextlib.suppress(BrokenPipeError):
                one.close()


def _forget() -> None:
    """A forked child does not hold the process's input open: it must see the end of the rank."""
    for one in list(_OPEN):
        process, one._process = one._process, None
        if process is not None:
            _close(process.stdin, process.stdout)
            process.returncode = 0  # it is no child of this process
    _OPEN.clear()


_OPEN: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget)
