"""The hardware files of this machine: written, read, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tutti.costs.collective_seconds import (
    RankGroup,
    collective_seconds,
    message_seconds,
)
from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.planning import hardware_files
from tutti.planning.hardware_files import Measured, MeasuredHosts

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
    assert device.probe_seconds is None
    assert all("measured" in f.source for f in (device.bandwidth, link.bandwidth))


def test_the_speed_probe_of_a_calibration_is_kept(tmp_path: Path) -> None:
    path = hardware_files.write(replace(FOUND, probe=6e-4), tmp_path)
    probe = catalog.device(str(path)).probe_seconds
    assert probe is not None and probe.value == 6e-4


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


def test_hosts_like_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    hardware_files.write(FOUND, tmp_path)
    assert hardware_files.cluster_of("this-machine").count == 4
    with pytest.warns(UserWarning, match="links between hosts were not measured"):
        cluster = hardware_files.cluster_of("8 x this-machine")
    assert (cluster.count, cluster.num_hosts) == (8, 2)
    hardware_files.write(FOUND, tmp_path, MeasuredHosts(2, start=1e-3, rate=1e8, message=5e7))
    catalog.topology.cache_clear()
    cluster = hardware_files.cluster_of("8 x this-machine")
    # Each of the four devices of a host sends 100 MB/s at the same time.
    large, small = (
        collective_seconds("all_reduce", n, RankGroup(2, 1), cluster.topology) for n in (1e8, 0)
    )
    assert small == pytest.approx(1e-3)
    assert large - small == pytest.approx(1.0)
    assert message_seconds(1e8, cluster.topology, across_hosts=True) == pytest.approx(2.0)


def test_the_slowest_host_counts() -> None:
    other = replace(FOUND, memory=4e9, call=2e-4, peaks={"float32": 2e11, "bfloat16": 1e11})
    found = hardware_files.slowest([FOUND, other])
    assert found == replace(FOUND, memory=4e9, call=2e-4, peaks={"float32": 1e11, "bfloat16": 1e11})
