"""Two hosts on this machine: network namespaces joined by a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from forked import Forked

SECONDS = 90
PORT = 29511
TORCHRUN = ["-m", "torch.distributed.run"]
Hosts = list[tuple[str, str]]  # (namespace, interface), 10.77.0.1 and .2


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def network_hosts(rate: str = "") -> Iterator[Hosts]:
    """Two hosts. `rate`: of the cable, such as `400mbit`. Skips the test where they cannot be made."""
    if shutil.which("ip") is None or (rate and shutil.which("tc") is None):
        pytest.skip("no `ip` or `tc` command here: cannot make two hosts")
    tag = uuid.uuid4().hex[:6]
    names = [(f"tutti-{tag}-{i}", f"tt{tag}{i}") for i in range(2)]
    try:
        try:
            _join(names, rate)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        yield names
    finally:
        for namespace, _ in names:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _join(names: Hosts, rate: str) -> None:
    for namespace, _ in names:
        _ip("netns", "add", namespace)
    _ip("link", "add", names[0][1], "type", "veth", "peer", "name", names[1][1])
    for i, (namespace, interface) in enumerate(names):
        _ip("link", "set", interface, "netns", namespace)
        _ip("-n", namespace, "addr", "add", f"10.77.0.{i + 1}/24", "dev", interface)
        for device in (interface, "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        if rate:
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            command = [
                "ip",
                "netns",
                "exec",
                namespace,
                "tc",
                "qdisc",
                "add",
                "dev",
                interface,
                "root",
            ]
            subprocess.run([*command, *bucket], check=True, capture_output=True, text=True)


def torchrun(hosts: Hosts, per_host: int, script: Path, words: Sequence[str] = ()) -> list[str]:
    """What a script prints on each host, with so many ranks on each."""
    support = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [support, os.getenv("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        Forked(
            [*TORCHRUN, "--nnodes=2", f"--node-rank={i}", f"--nproc-per-node={per_host}"]
            + ["--master-addr=10.77.0.1", f"--master-port={PORT}", str(script), *words],
            env={**environment, "GLOO_SOCKET_IFNAME": interface},
            cwd=Path.cwd(),
            network=Path("/var/run/netns") / namespace,
        )
        for i, (namespace, interface) in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(err for _, err in outputs)
    assert all(process.returncode == 0 for process in processes), errors
    return [out for out, _ in outputs]
