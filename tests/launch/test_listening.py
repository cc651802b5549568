"""A run of one host listens on loopback and in files only: launcher, ranks and servers, from start to end."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import Forked

SCRIPT = Path(__file__).parent / "causes.py"
START_SECONDS = 120.0
_LISTENING, _UNCONNECTED = "0A", "07"  # states of TCP sockets, and of UDP ones (proc_net_tcp(5))


def address(text: str) -> str:
    """An address as /proc/net/tcp and tcp6 write it: 32-bit words in the byte order of the host."""
    words = [int(text[k : k + 8], 16) for k in range(0, len(text), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(ipaddress.ip_address(packed))


def processes(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def sockets(pid: int) -> Iterator[str]:
    """The inodes of a process's sockets."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}")):
                yield match[1]
    except OSError:  # it has ended
        return


def listening(pids: list[int]) -> set[str]:
    """The addresses at which these processes can be reached."""
    own = {inode for pid in pids for inode in sockets(pid)}
    found = set()
    for kind, state in (("tcp", _LISTENING), ("udp", _UNCONNECTED)):
        for name in (kind, f"{kind}6"):
            path = Path(f"/proc/net/{name}")
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                words = line.split()
                if words[9] in own and words[3] == state:
                    found.add(address(words[1].split(":")[0]))
    return found


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert listening([os.getpid()]) >= {"127.0.0.1", "0.0.0.0"}


@pytest.mark.parametrize(
    "layout",
    ["data=2", "pipe=2 micro=2", "replica=2 sync=diloco(every=2)", "replica=2 server=1 sync=async"],
)
def test_a_run_listens_on_loopback_alone(layout: str, tmp_path: Path) -> None:
    words = [str(SCRIPT), "SIGTERM", "launcher", str(tmp_path), "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = Forked(["-m", "tutti", "run", "--layout", layout, *words], env=env, cwd=Path.cwd())
    found: set[str] = set()
    at_step = threading.Event()

    def look() -> None:
        while not at_step.wait(0.05):
            found.update(listening(processes(process.pid)))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        at_step.set()
        looking.join()
        found |= listening(processes(process.pid))
        assert line.startswith("rank 0 at step"), process.communicate(timeout=5)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=START_SECONDS)
    finally:
        at_step.set()
        process.kill()
    # Gloo's own sockets and a server's show that this looks at the right processes.
    expected = {"127.0.0.1"} if "diloco" not in layout else found
    assert found == expected and found <= {"127.0.0.1", "::1"}, found
