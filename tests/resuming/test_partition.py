"""Two hosts that lose each other: one goes on and saves, the other one says that it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from forked import Forked
from network_hosts import PORT, TORCHRUN, network_hosts
from resuming.test_stops import SCRIPT, losses, saved

LAYOUT = "replica=2 data=2 sync=diloco(every=4)"
START_SECONDS, MORE_SECONDS, STEPS = 90.0, 60.0, 2400


def test_one_host_goes_on_and_the_other_one_ends(tmp_path: Path) -> None:
    """The store of the run lies on the first host, so the second one cannot make a new group."""
    settings = {**os.environ, "TUTTI_LAYOUT": LAYOUT, "TUTTI_LEASE": "2", "TUTTI_TIMEOUT": "10"}
    with network_hosts() as hosts:
        runs = [
            Forked(
                [*TORCHRUN, "--nnodes=2", f"--node-rank={i}", "--nproc-per-node=2"]
                + ["--master-addr=10.77.0.1", f"--master-port={PORT}"]
                + [str(SCRIPT), str(tmp_path / "run"), str(STEPS), "0.1"],
                env={**settings, "GLOO_SOCKET_IFNAME": interface},
                cwd=tmp_path,
                network=Path("/var/run/netns") / namespace,
            )
            for i, (namespace, interface) in enumerate(hosts)
        ]
        try:
            _wait_for_step(tmp_path, 6, runs[0], START_SECONDS)
            namespace, interface = hosts[1]
            cut = ["ip", "-n", namespace, "link", "set", interface, "down"]
            subprocess.run(cut, check=True, capture_output=True)
            begin = max(losses(tmp_path))
            _, said = runs[1].communicate(timeout=MORE_SECONDS)
            assert "CheckpointError: another run saves into" in said
            _wait_for_step(tmp_path, begin + 24, runs[0], MORE_SECONDS)
            assert saved(tmp_path)[-1] > begin + 4
        finally:
            for one in runs:
                _end(one)


def _wait_for_step(folder: Path, step: int, agent: Forked, seconds: float) -> None:
    until = time.monotonic() + seconds
    while max(losses(folder), default=0) < step:
        assert agent.poll() is None, agent.communicate(timeout=10)
        assert time.monotonic() < until
        time.sleep(0.05)


def _end(agent: Forked) -> None:
    """End an agent, which may wait for the other one, and its ranks."""
    for path in Path("/proc").glob(f"{agent.pid}/task/*/children"):
        for pid in path.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    agent.kill()
