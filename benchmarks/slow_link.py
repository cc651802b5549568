"""A slow cable between two network namespaces, in a process of its own: rate and delay of every packet.

    namespace a   interface -> tun -+                      +- tun -> interface   namespace b
                                    +- queue: departs when -+
                                       the line is free, arrives `delay` later

For kernels that delay no packets themselves. `python -m benchmarks.slow_link ONE OTHER MBIT SECONDS` joins
two namespaces. It prints "ready" once both interfaces, `slow0` with 10.78.0.1 and 10.78.0.2, are up, and ends
with its parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

INTERFACE = "slow0"
_TUNSETIFF, _TUN_NO_INFO = 0x400454CA, 0x0001 | 0x1000
_CLONE_NEWNET, _PDEATHSIG, _SIGKILL = 0x40000000, 1, 9
_MOST = 20_000  # packets that a line holds; further ones are lost
_MTU = 9000


@dataclass
class Line:
    """One direction: packets with the time at which they arrive."""

    source: int
    to: int
    free: float = 0.0
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, rate: float, delay: float) -> None:
        """A packet that wants to leave; `rate` in bytes a second."""
        data = os.read(self.source, 2**16)
        if len(self.packets) < _MOST:
            self.free = max(self.free, time.monotonic()) + len(data) / rate
            self.packets.append((self.free + delay, data))

    def bring(self) -> None:
        """Those whose time has come."""
        while self.packets and self.packets[0][0] <= time.monotonic():
            os.write(self.to, self.packets.popleft()[1])


def tun(namespace: str, address: str) -> int:
    """The end of an interface in a namespace; this thread is then in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _TUN_NO_INFO))
    for words in (
        ["addr", "add", f"{address}/24", "dev", INTERFACE],
        ["link", "set", INTERFACE, "mtu", str(_MTU), "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return fd


def main() -> None:
    """Carry packets until the parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, _SIGKILL)
    one, other, mbit, delay = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    a, b = tun(one, "10.78.0.1"), tun(other, "10.78.0.2")
    lines = [Line(a, b), Line(b, a)]
    print("ready", flush=True)
    while True:
        due = [line.packets[0][0] for line in lines if line.packets]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([line.source for line in lines], [], [], wait)
        for line in lines:
            if line.source in ready:
                line.take(mbit * 1e6 / 8, delay)
            line.bring()


if __name__ == "__main__":
    main()
