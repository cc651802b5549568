"""`tutti calibrate`: measures, and writes files that a plan reads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import forked
from tutti.planning import hardware_files

SCRIPT = Path(__file__).parent / "quick_calibrate.py"


def test_this_machine_is_measured(tmp_path: Path) -> None:
    words = [SCRIPT, "calibrate", "-n", "2", "--output", tmp_path]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(words, env=env, cwd=Path.cwd(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "matmul of a device" in done.stdout
    cluster = hardware_files.cluster_here(tmp_path / "this-machine.toml")
    assert cluster.count == 2
    assert 1e9 < cluster.device.bandwidth.value < 1e12
    assert 1e9 < cluster.device.peak_of(torch.float32) < 1e14
    assert 0 < cluster.topology.inside.start.value < 0.05
