"""Two hosts under plain `torchrun`, each a network namespace: the same numbers as on one host."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import runs
from forked import Forked
from ranks import Ranks
from tests.launch.two_hosts import total

TRAINING = Path(__file__).parent / "two_hosts_train.py"
SECONDS = 90
PORT = 29511
TORCHRUN = ["-m", "torch.distributed.run"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def found(hosts: list[tuple[str, str]]) -> list[float]:
    """What rank 0 prints: a total and losses. The namespaces have no way but the cable between them,
    so it carried the collectives."""
    path = os.pathsep.join(
        filter(None, [str(TRAINING.parents[1] / "support"), os.getenv("PYTHONPATH")])
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        Forked(
            [*TORCHRUN, "--nnodes=2", f"--node-rank={i}", "--nproc-per-node=2"]
            + ["--master-addr=10.77.0.1", f"--master-port={PORT}", TRAINING],
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
    (line,) = [x for out, _ in outputs for x in out.splitlines() if x.startswith("found")]
    return [float(word) for word in line.split()[1:]]


def test_two_hosts_compute_what_one_computes(found: list[float], ranks: Ranks) -> None:
    for one in ranks.run(total, n=4):
        assert found[0] == pytest.approx(one, rel=1e-12, abs=1e-12)


def test_two_hosts_train_as_one_device(found: list[float]) -> None:
    runs.assert_same_losses(found[1:], runpy.run_path(str(TRAINING))["losses"](""))
