"""Which ranks lie on one host, so that they can share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_name() -> str:
    """The same text on two processes where they run on one host and may see each other, else another.

    The boot's id tells machines apart, the namespaces containers on one machine: a process in another
    PID namespace cannot be looked at, one in another network namespace is treated as another host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    for kind in ("pid", "net"):
        link = f"/proc/self/ns/{kind}"
        parts.append(os.readlink(link) if os.path.islink(link) else "")
    return "/".join([*parts, str(os.getuid())])
