"""`tutti calibrate`: measures, and writes files that a plan reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tutti.calibration import measurement
from tutti.cli.main import app
from tutti.planning import hardware_files


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = measurement.measured
    monkeypatch.setattr(measurement, "measured", lambda count: quick(count, 0.02))
    result = CliRunner().invoke(app, ["calibrate", "-n", "2", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "matmul of a device" in result.stdout
    cluster = hardware_files.cluster_here(tmp_path / "this-machine.toml")
    assert cluster.count == 2
    assert 1e9 < cluster.device.bandwidth.value < 1e12
    assert 1e9 < cluster.device.peak_of(torch.float32) < 1e14
    assert 0 < cluster.topology.inside.start.value < 0.05
