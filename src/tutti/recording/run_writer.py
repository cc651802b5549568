"""Appends the records of this process to its file, a line of JSON each.

    {"kind": "begin", "time": 1765000000.0, "name": "rank 0", "argv": ["train.py"], ...}
    {"kind": "steps", "of": 1, "names": ["loss"], "points": [[1, 0.81, 0.8, 2.77], ...]}
    {"kind": "nan", "of": 1, "step": 12, "name": "loss", "value": "nan"}

A process that starts again appends another `begin`. Lines are written whole; one that a kill has cut is ended
by the next start. Numbers that JSON lacks are texts: "nan", "inf", "-inf".
"""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tutti.environment import REPORT
from tutti.recording.report_folder import LAUNCHER, check_report_folder, process_name, records_file


class RunWriter:
    """The file of one process; opened, and begun with a line about the process, at the first record.

    A failure to write (a full disk) ends the records with a warning, and not the run.

    Args:
        folder: of the report.
        name: of this process: `rank 0`, `worker 0`, `launcher`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, records_file(folder, name)
        self.began = time.time()  # of the times of its points
        self.numbers = count(1)  # of the steps of `distribute` in this process
        self._pid = os.getpid()
        self._fd: int | None = None
        self._lock = threading.RLock()
        self._sources: list[Callable[[], None]] = []
        self._failed = False

    @property
    def leads(self) -> bool:
        """Whether this process records what all ranks do together: rank 0, or the first worker's first."""
        return self.name in ("rank 0", "worker 0")

    def write(self, kind: str, **shown: Any) -> None:
        """Append a record with the time of now. A forked child (of a loader) has none."""
        if self._failed or os.getpid() != self._pid:
            return
        with self._lock:
            try:
                if self._fd is None:
                    self._fd = self._open()
                    self._put({"kind": "begin", "time": self.began, **_this_process(self.name)})
                self._put({"kind": kind, "time": round(time.time(), 3), **shown})
            except OSError as error:
                self._failed = True
                warnings.warn(
                    f"no more records of this run: cannot write {self.path}: {error}", stacklevel=2
                )

    def before_end(self, source: Callable[[], None]) -> None:
        """Call `source`, which may write, before the end of this process."""
        self._sources.append(source)

    def flush(self) -> None:
        """Let all sources write what they hold back."""
        if self._lock.acquire(timeout=1.0):  # a thread at the end of the process must not hang
            try:
                for source in self._sources:
                    source()
            finally:
                self._lock.release()

    def end(self) -> None:
        """Write what is held back, and that the process ended by itself; nothing if it has no records."""
        if os.getpid() != self._pid:
            return
        self.flush()
        if self._fd is not None:
            self.write("end")

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")  # ends the line that a kill has cut
        return fd

    def _put(self, record: dict[str, Any]) -> None:
        assert self._fd is not None
        text = json.dumps(finite(record), separators=(",", ":"), default=str)
        data = memoryview(f"{text}\n".encode("utf-8", "replace"))
        while data:
            data = data[os.write(self._fd, data) :]


def writer() -> RunWriter | None:
    """The writer of this process; None unless `TUTTI_REPORT` names a folder.

    Raises:
        TuttiError: it cannot be written to.
    """
    folder = REPORT.read()
    return _writer_at(folder, process_name(), os.getpid()) if folder else None


def launcher_writer() -> RunWriter | None:
    """The writer of a launcher, if this process is one, and its run has a folder for its report."""
    folder = REPORT.read()
    return _writer_at(folder, LAUNCHER, os.getpid()) if folder else None


def note(kind: str, **shown: Any) -> None:
    """Record an event that all ranks see: once, by the leading one."""
    made = writer()
    if made is not None and made.leads:
        made.write(kind, **shown)


@cache
def _writer_at(folder: str, name: str, _pid: int) -> RunWriter:
    check_report_folder(Path(folder))
    made = RunWriter(Path(folder), name)
    atexit.register(made.end)
    return made


def _this_process(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "argv": sys.argv,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "versions": {
            "tutti": str(vars(sys.modules["tutti"]).get("__version__", "")),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "platform": platform.platform(),
        "processors": os.cpu_count(),
    }


def finite(x: Any) -> Any:
    """`x` with texts in place of the numbers that JSON lacks."""
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, dict):
        return {str(k): finite(v) for k, v in x.items()}
    return [finite(v) for v in x] if isinstance(x, list | tuple) else x
