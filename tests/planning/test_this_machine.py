"""This machine as a plan's cluster: fewer, as many and more ranks than processors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.test_hardware_files import FOUND
from tutti.costs.rank_groups import RankGroups
from tutti.layout import Layout
from tutti.planner.estimates.priced_machine import MeasuredKernels
from tutti.planning import hardware_files
from tutti.planning.kernel_times import GraphTimes
from tutti.planning.processor_speed import ProcessorSpeed
from tutti.planning.this_machine import kernels_timed, machine_here, question_here, shared_by
from tutti.planning.timed_kernels import TimedKernels


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware_files.write(FOUND, tmp_path)
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("num_ranks", "processes", "threads", "share"),
    [
        (1, 1, 4, 1.0),
        (2, 2, 2, 1.0),
        (4, 4, 1, 1.0),
        (8, 8, 1, 2.0),
        (6, 6, 1, 1.5),
        (16, 8, 1, 4.0),
    ],
)
@pytest.mark.usefixtures("calibrated")
def test_ranks_take_turns_where_processors_are_few(
    num_ranks: int, processes: int, threads: int, share: float
) -> None:
    made = machine_here(hardware_files.cluster_here(), num_ranks)
    assert made.kernels == MeasuredKernels(TimedKernels(processes, threads))
    assert made.ranks_per_processor == share


@pytest.mark.usefixtures("calibrated")
def test_one_thread_each_leaves_processors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = machine_here(hardware_files.cluster_here(), 2)
    assert (made.kernels, made.ranks_per_processor) == (MeasuredKernels(TimedKernels(2, 1)), 1.0)


@pytest.mark.usefixtures("calibrated")
def test_more_ranks_than_devices_are_on_one_host_and_share_its_memory() -> None:
    cluster = hardware_files.cluster_here()
    assert shared_by(cluster, 2) is cluster
    crowded = question_here(num_ranks=8).cluster
    assert (crowded.count, crowded.num_hosts) == (8, 1)
    assert crowded.device.capacity.value == cluster.device.capacity.value / 2
    groups = RankGroups(Layout.parse("data=8").mesh, crowded.topology.host_size)
    assert groups["data",].num_hosts == 1
    assert question_here(num_ranks=2).cluster == cluster


def test_estimates_are_as_slow_as_the_processor_was(tmp_path: Path) -> None:
    """All of them, by the probe while graphs of any layout ran: links as calibrated, and one factor."""
    cluster = hardware_files.cluster_here(
        hardware_files.write(replace(FOUND, probe=5e-4), tmp_path)
    )
    timed = kernels_timed(cluster)
    for seconds in (1e-3, 1e-3, 9e-3):  # twice as slow as at the calibration, mostly
        timed(2, 1).times.add(GraphTimes({}, [seconds], seconds))
    made = machine_here(cluster, 4, timed)
    assert (made.topology, made.call_seconds) == (cluster.topology, 1e-4)
    assert made.pace is not None and made.pace() == 2.0
    timed(2, 1).times.add(GraphTimes({}, [9.0], 9.0))
    assert made.pace() == 2.0  # for all estimates of the plan


def test_processes_slow_each_other_down() -> None:
    """By as much as the probe shows at one moment, whenever that was."""
    speed = ProcessorSpeed(1.0)
    speed.add(2, 1.0, [1.5, 1.5])
    speed.add(2, 1.0, [1.5, 1.5])
    speed.add(1, 4.0, [4.0, 4.1])  # at a slow moment
    assert (speed.factor(2), speed.factor(1)) == (1.5, 1.0)
    assert ProcessorSpeed(1.0).factor(2) == 1.0


@pytest.mark.parametrize("probe", [1.0, None])
def test_links_between_hosts_have_no_factor(probe: float | None) -> None:
    speed = ProcessorSpeed(probe, fixed=True)
    speed.add(2, 1.0, [1.5])
    speed.add(1, 4.0, [4.0])
    assert speed.probe_seconds == (probe or 1.5)
    assert speed.factor(2) == 1.0 and speed.factor(1) == pytest.approx(1 / 1.5)


def test_ranks_that_take_turns_wait_longer_for_each_other(tmp_path: Path) -> None:
    path = hardware_files.write(replace(FOUND, crowded=3e-4), tmp_path)
    cluster = hardware_files.cluster_here(path)
    processors = os.cpu_count() or 1
    fits, crowded = (machine_here(cluster, n * processors) for n in (1, 4))
    assert (fits.topology.inside.start.value, fits.message_start) == (1e-5, 0.0)
    assert crowded.topology.inside.start.value == 3e-4
    assert crowded.message_start == pytest.approx(4 * 3e-4)
