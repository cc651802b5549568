"""Two hosts under plain `torchrun`, each a network namespace: the same numbers as on one host."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import runs

SCRIPT = Path(__file__).parent / "two_hosts.py"
TRAINING = Path(__file__).parent / "two_hosts_train.py"
SECONDS = 90
PORT = 29511
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces joined by a cable, as (namespace, interface); 10.77.0.1 and .2."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here: cannot make two hosts")
    tag = uuid.uuid4().hex[:6]
    names = [(f"tutti-{tag}-{i}", f"tt{tag}{i}") for i in range(2)]
    try:
        try:
            for namespace, _ in names:
                ip("netns", "add", namespace)
            ip("link", "add", names[0][1], "type", "veth", "peer", "name", names[1][1])
            for i, (namespace, interface) in enumerate(names):
                ip("link", "set", interface, "netns", namespace)
                ip("-n", namespace, "addr", "add", f"10.77.0.{i + 1}/24", "dev", interface)
                for device in (interface, "lo"):
                    ip("-n", namespace, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        yield names
    finally:
        for namespace, _ in names:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def totals(
    commands: list[list[str]], environments: list[dict[str, str]], word: str = "total"
) -> list[str]:
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(err for _, err in outputs)
    assert all(process.returncode == 0 for process in processes), errors
    return [line for out, _ in outputs for line in out.splitlines() if line.startswith(word)]


def on_both(hosts: list[tuple[str, str]], script: Path) -> list[list[str]]:
    """The commands that start two ranks of `script` on each host."""
    return [
        ["ip", "netns", "exec", namespace, *TORCHRUN, "--nnodes=2", f"--node-rank={i}"]
        + ["--nproc-per-node=2", "--master-addr=10.77.0.1", f"--master-port={PORT}", str(script)]
        for i, (namespace, _) in enumerate(hosts)
    ]


def test_two_hosts_compute_what_one_computes(hosts: list[tuple[str, str]]) -> None:
    """The namespaces have no way but the cable between them, so it carried the collectives."""
    two = totals(
        on_both(hosts, SCRIPT), [{"GLOO_SOCKET_IFNAME": interface} for _, interface in hosts]
    )
    local = [*TORCHRUN, "--standalone", "--nproc-per-node=4", str(SCRIPT)]
    one = totals([local], [{"GLOO_SOCKET_IFNAME": "lo"}])
    assert len(one) == 1 and two == one


def test_two_hosts_train_as_one_device(hosts: list[tuple[str, str]]) -> None:
    path = os.pathsep.join(filter(None, [str(TRAINING.parent.parent), os.getenv("PYTHONPATH")]))
    interfaces = [{"GLOO_SOCKET_IFNAME": i, "PYTHONPATH": path} for _, i in hosts]
    two = totals(on_both(hosts, TRAINING), interfaces, "losses")
    assert len(two) == 1
    expected = runpy.run_path(str(TRAINING))["losses"]("")
    runs.assert_same_losses([float(word) for word in two[0].split()[1:]], expected)
