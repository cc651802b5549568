"""Processes that write saves as copies of the process that starts them.

    with forked_writers():
        run.until(4)

A fresh interpreter takes 2 s of processor time until it has imported all it needs. These are processes with
a pid, an input and an output of their own, as `subprocess.Popen` makes them. Some tests start fresh ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tutti.resuming import background_writer, writer_process
from tutti.resuming.rendezvous import Rendezvous


class ForkedWriter:
    """The interface of `subprocess.Popen` as far as `BackgroundWriter` uses it."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        inputs, outputs = os.pipe(), os.pipe()
        kept = {fd: os.dup(fd) for fd in pass_fds}  # a copy of this process closes its own
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            for fd, copy in kept.items():
                os.dup2(copy, fd)
            self._become(command, inputs[0], outputs[1], pass_fds)
        for copy in kept.values():
            os.close(copy)
        os.close(inputs[0])
        os.close(outputs[1])
        self.stdin, self.stdout = os.fdopen(inputs[1], "wb"), os.fdopen(outputs[0], "rb")

    def _become(self, command: Sequence[str], given: int, said: int, kept: Sequence[int]) -> None:
        try:
            *_, name, fd, rendezvous, position = command
            assert name == writer_process.__name__
            kept_here = {0, 1, 2, given, said, *kept}
            for one in map(int, os.listdir("/proc/self/fd")):
                if one not in kept_here:
                    with contextlib.suppress(OSError):
                        os.close(one)
            sys.stdin, sys.stdout = os.fdopen(given), os.fdopen(said, "w")
            writer_process.main(int(fd), Rendezvous.of(rendezvous), int(position))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, negative for a signal."""
        until = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("writer", timeout)
            else:
                time.sleep(0.002)
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def forked_writers() -> Iterator[None]:
    """Context in which a run's first save starts a copy of this process."""
    with mock.patch.object(background_writer.subprocess, "Popen", ForkedWriter):
        yield
