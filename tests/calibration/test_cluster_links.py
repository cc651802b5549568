"""Two hosts are measured together: the slower one counts, and the cable between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from network_hosts import network_hosts, torchrun
from tests.calibration.two_hosts_calibrate import PEAK
from tutti.cli.main import app
from tutti.costs.collective_seconds import RankGroup, collective_seconds
from tutti.planning.hardware_files import cluster_of

SCRIPT = Path(__file__).parent / "two_hosts_calibrate.py"
RATE, NBYTES = 25e6, 1 << 24  # bytes per second of the cable; of an all-reduce


def test_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with network_hosts("200mbit") as hosts:
        torchrun(hosts, 1, SCRIPT, [str(tmp_path)])
    found = [path.read_text() for path in sorted(tmp_path.glob("*/this-machine*.toml"))]
    assert len(found) == 8 and found[:4] == found[4:]  # each host has the same figures
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path / "0"))
    cluster = cluster_of("2 x this-machine")
    assert (cluster.count, cluster.num_hosts) == (2, 2)
    assert cluster.device.peak_of(torch.float32) == PEAK
    between = cluster.topology.between
    assert 0 < between.bandwidth.value < 1.1 * RATE
    assert between.start.value > 0
    # Priced again, the all-reduce takes no less than its bytes on the cable.
    seconds = collective_seconds("all_reduce", NBYTES, RankGroup(2, 1), cluster.topology)
    assert seconds > NBYTES / RATE / 1.1


def test_a_number_of_devices_does_not_go_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["calibrate", "-n", "2"])
    assert result.exit_code == 2
    assert "--nproc-per-node" in result.stderr
