"""This machine as a plan's cluster: fewer, as many and more ranks than processors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.test_hardware_files import FOUND
from tutti.costs.rank_groups import RankGroups
from tutti.layout import Layout
from tutti.planning import hardware_files
from tutti.planning.kernel_times import GraphTimes, KernelTimes
from tutti.planning.this_machine import machine_here, question_here, shared_by
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
    assert made.kernels == TimedKernels(processes, threads, in_turns=share > 1)
    assert made.ranks_per_processor == share


@pytest.mark.usefixtures("calibrated")
def test_one_thread_each_leaves_processors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = machine_here(hardware_files.cluster_here(), 2)
    assert (made.kernels, made.ranks_per_processor) == (TimedKernels(2, 1), 1.0)


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


def test_links_and_calls_are_as_fast_as_the_processor_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hardware_files.write(replace(FOUND, probe=5e-4), tmp_path)
    cluster, times = hardware_files.cluster_here(path), KernelTimes()
    times.add(GraphTimes({}, [1e-3, 9e-3, 1e-3]))  # twice as slow as at the calibration

    def timed(num_ranks: int, num_threads: int, in_turns: bool) -> TimedKernels:
        return TimedKernels(num_ranks, num_threads, in_turns, times)

    made = machine_here(cluster, 4, timed)
    link = made.topology.inside
    assert (link.start.value, link.bandwidth.value) == (2e-5, 4e9)
    assert made.call_seconds == 2e-4
    without = hardware_files.cluster_here(hardware_files.write(FOUND, tmp_path / "old"))
    made = machine_here(without, 4, timed)
    assert (made.topology, made.call_seconds) == (without.topology, 1e-4)


def test_ranks_that_take_turns_wait_longer_for_each_other(tmp_path: Path) -> None:
    path = hardware_files.write(replace(FOUND, crowded=3e-4), tmp_path)
    cluster = hardware_files.cluster_here(path)
    processors = os.cpu_count() or 1
    fits, crowded = (machine_here(cluster, n * processors) for n in (1, 4))
    assert (fits.topology.inside.start.value, fits.message_start) == (1e-5, 0.0)
    assert crowded.topology.inside.start.value == 3e-4
    assert crowded.message_start == pytest.approx(4 * 3e-4)


def test_before_a_kernel_is_timed_the_probe_runs() -> None:
    assert 0.0 < TimedKernels(1, 1).probe_seconds() < 1.0
