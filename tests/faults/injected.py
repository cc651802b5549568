"""The faults that a run may meet, and what `docs/promises.md` promises under each.

A fault is done to a run at a moment; its promise is a set of ends. `Ends` says which exit codes and which
first lines of the report are right; the harness looks at everything that is promised under all faults.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tutti.checkpoint.manifest import MANIFEST


class Run(Protocol):
    """A run under way."""

    directory: Path
    layout: str
    launcher: int

    def ranks(self) -> dict[str, int]:
        """Process numbers of ranks or workers by name, such as "rank0"."""
        ...

    def servers(self) -> dict[str, int]:
        """The same of servers."""
        ...


@dataclass(frozen=True)
class Ends:
    """How a run may end: exit codes, and a pattern for the report's first line where the code is not 0."""

    codes: tuple[int, ...]
    line: str = ""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    inject: does it; returns whom it hit.  ends: by layout and who was hit.  fits: which layouts meet it.
    short_timeout: whether ranks must wait seconds, not minutes, for one that does not come.
    """

    name: str
    inject: Callable[[Run, random.Random], str]
    ends: Callable[[str, str], Ends]
    fits: Callable[[str], bool] = lambda layout: True
    short_timeout: bool = False


def apart(layout: str) -> bool:
    """Whether replicas or workers go on without one that is lost."""
    return "replica=" in layout and "sync=step" not in layout


def _signaled(number: int) -> Callable[[Run, random.Random], str]:
    def inject(run: Run, chooses: random.Random) -> str:
        name = chooses.choice(sorted(run.ranks()))
        os.kill(run.ranks()[name], number)
        return name

    return inject


def _launcher(number: int) -> Callable[[Run, random.Random], str]:
    def inject(run: Run, chooses: random.Random) -> str:
        os.kill(run.launcher, number)
        return "the launcher"

    return inject


def _paused(everyone: bool) -> Callable[[Run, random.Random], str]:
    """Stopped for one to three seconds, and then let go on."""

    def inject(run: Run, chooses: random.Random) -> str:
        every = {**run.ranks(), **run.servers()}
        names = sorted(every) if everyone else [chooses.choice(sorted(every))]
        for name in names:
            os.kill(every[name], signal.SIGSTOP)
        time.sleep(chooses.uniform(1.0, 3.0))
        for name in names:
            os.kill(every[name], signal.SIGCONT)
        return ", ".join(names)

    return inject


def _raises(run: Run, chooses: random.Random) -> str:
    name = chooses.choice(sorted(run.ranks()))
    (run.directory / f"fail.{name}").write_text("")
    return name


def _limited(what: int, most: Callable[[int], int]) -> Callable[[Run, random.Random], str]:
    """The first rank of the run gets no more of a resource than `most` of its process number."""

    def inject(run: Run, chooses: random.Random) -> str:
        name = sorted(run.ranks())[0]
        pid = run.ranks()[name]
        _, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most(pid), hard))
        return name

    return inject


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd")) + 1


def _server_dies(run: Run, chooses: random.Random) -> str:
    name = chooses.choice(sorted(run.servers()))
    os.kill(run.servers()[name], signal.SIGKILL)
    return name


def _noise(run: Run, chooses: random.Random) -> str:
    """Connections to whatever the run listens on: idle ones, random bytes, bytes that begin well."""
    ports = listening([*run.ranks().values(), *run.servers().values(), run.launcher])
    kept = []
    for port in ports * 8:
        sock = socket.socket()
        sock.settimeout(5.0)
        try:
            sock.connect(("127.0.0.1", port))
            beginning = chooses.choice([b"", b"tuti\x02", b"tutti post 2", b"GET / HTTP/1.1\r\n"])
            sock.sendall(beginning + chooses.randbytes(chooses.choice([0, 10, 5000])))
        except OSError:
            pass
        kept.append(sock)
    time.sleep(0.3)
    for sock in kept:
        sock.close()
    return f"{len(ports)} ports"


def listening(pids: list[int]) -> list[int]:
    """The TCP ports, on any address, that these processes listen on."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def flip_a_bit(directory: Path, chooses: random.Random) -> str:
    """In a file of the checkpoint; after the run."""
    files = [f for f in (directory / "checkpoint").rglob("*") if f.is_file() and f.stat().st_size]
    file = chooses.choice(sorted(files))
    content = bytearray(file.read_bytes())
    bit = chooses.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return f"bit {bit} of {file.name}"


def holds_checkpoint(directory: Path) -> bool:
    """Whether a save has ended there."""
    return (directory / "checkpoint" / MANIFEST).exists()


_WELL = Ends((0,))


def _of_rank(hit: str) -> str:
    """ "rank 0" of "rank0"; of "worker0" also the rank that it is."""
    return re.sub(r"(\d+)$", r" \1", hit).replace("worker", "(worker|rank)")


def _killed(layout: str, hit: str) -> Ends:
    said = rf"(CommError: )?{_of_rank(hit)} died \(signal 9\)"
    return Ends((0,), said) if apart(layout) else Ends((1,), said)


def _stopped(layout: str, hit: str) -> Ends:
    said = rf"(CommError: )?{_of_rank(hit)} was stopped \(SIGSTOP\)"
    return Ends((0, 1), said) if apart(layout) else Ends((1,), said)


def _raised(_layout: str, hit: str) -> Ends:
    return Ends((1,), rf"{_of_rank(hit)} failed: ValueError: a batch of the wrong kind")


def _ended_by(name: str, code: int) -> Callable[[str, str], Ends]:
    # A run that has come to its end meanwhile has ended well.
    return lambda layout, hit: Ends((0, code), f"ended by {name}, sent to the launcher")


def _lacks(layout: str, hit: str) -> Ends:
    """A rank that cannot write: all say so, or, where there was no need to write any more, all is well."""
    return Ends((0, 1, 2), r"(\[rank \d\] )?CheckpointError: cannot write the checkpoint")


def _lacks_descriptors(layout: str, hit: str) -> Ends:
    return Ends((0, 1, 2), r"(\[rank \d\] )?(CheckpointError|CommError)|rank \d failed: OSError")


def _synchronous(layout: str) -> bool:
    return "replica=" not in layout


def _served(layout: str) -> bool:
    return "server=" in layout


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("a rank is killed", _signaled(signal.SIGKILL), _killed),
        Fault("a rank is stopped", _signaled(signal.SIGSTOP), _stopped, short_timeout=True),
        Fault("a rank is paused", _paused(False), lambda layout, hit: _WELL),
        Fault("all are paused", _paused(True), lambda layout, hit: _WELL),
        Fault("a rank raises", _raises, _raised),
        Fault("Ctrl-C", _launcher(signal.SIGINT), _ended_by("SIGINT", 130)),
        Fault("the launcher gets SIGTERM", _launcher(signal.SIGTERM), _ended_by("SIGTERM", 143)),
        Fault(
            "the launcher is killed", _launcher(signal.SIGKILL), lambda layout, hit: Ends((0, -9))
        ),
        Fault(
            "no room on the disk",
            _limited(resource.RLIMIT_FSIZE, lambda pid: 400),
            _lacks,
            fits=_synchronous,
        ),
        Fault(
            "no descriptors",
            _limited(resource.RLIMIT_NOFILE, _descriptors),
            _lacks_descriptors,
            fits=_synchronous,
        ),
        Fault("strangers connect", _noise, lambda layout, hit: _WELL),
        Fault("a server is killed", _server_dies, lambda layout, hit: _WELL, fits=_served),
    )
}
