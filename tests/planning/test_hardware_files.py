"""The hardware files of this machine: written, read, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tutti.errors import PlanError
from tutti.planner.hardware import catalog
from tutti.planning import hardware_files
from tutti.planning.hardware_files import Measured

FOUND = Measured(
    name="a processor, 4 devices",
    num_devices=4,
    peaks={"float32": 1e11, "bfloat16": 2e11},
    memory=8e9,
    bandwidth=1e10,
    launch=2e-6,
    call=1e-4,
    start=1e-5,
    rate=8e9,
    message=4e9,
)


def test_a_cluster_has_what_was_measured(tmp_path: Path) -> None:
    cluster = hardware_files.cluster_here(hardware_files.write(FOUND, tmp_path / "new"))
    device, link = cluster.device, cluster.topology.inside
    assert (cluster.count, cluster.num_hosts) == (4, 1)
    assert device.peak_of(torch.bfloat16) == 2e11
    assert (device.capacity.value, device.bandwidth.value) == (8e9, 1e10)
    assert device.call_seconds is not None
    assert (device.host_seconds.value, device.call_seconds.value) == (2e-6, 1e-4)
    assert (link.bandwidth.value, link.start.value) == (8e9, 1e-5)
    assert link.message_efficiency.value == 0.5
    assert all("measured" in f.source for f in (device.bandwidth, link.bandwidth))


def test_a_machine_that_is_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    with pytest.raises(PlanError, match="has not been calibrated") as found:
        hardware_files.cluster_here()
    assert "tutti calibrate" in str(found.value)


def test_a_figure_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    path = hardware_files.write(replace(FOUND, bandwidth=1.0), tmp_path)
    with pytest.raises(PlanError, match="bandwidth = 1 cannot be right"):
        catalog.device(str(path))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot write to"):
        hardware_files.write(FOUND, tmp_path / "file")
