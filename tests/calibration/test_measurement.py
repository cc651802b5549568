"""`tutti calibrate`: measures, and writes files that a plan reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from tutti.calibration import crowded_start, measurement, rank_measurement
from tutti.errors import PlanError
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
    assert cluster.device.probe_seconds is not None
    assert 1e-6 < cluster.device.probe_seconds.value < 0.1
    if 2 * (os.cpu_count() or 1) <= crowded_start._MOST_RANKS:
        assert cluster.topology.inside.crowded_start is not None


def test_a_signal_ends_a_calibration_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has printed a line; 130 and 143 are no failures of the processes."""
    for code, error in ((130, SystemExit), (143, SystemExit), (1, PlanError)):
        monkeypatch.setattr(rank_measurement, "launch", lambda *_, code=code: code)
        with pytest.raises(error, match=str(code)):
            rank_measurement.found_by_ranks(2, "x.py", 1.0)


def test_what_an_exchange_of_ranks_that_take_turns_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks a processor: kernels of 3 s, and an exchange of 0.8 s beside them."""
    wall, own, pace = [0.0], [0.0], [1.0]
    monkeypatch.setattr(crowded_start.time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(crowded_start.os, "cpu_count", lambda: 1)

    def kernels() -> None:
        own[0] += 3.0 * pace[0]
        wall[0] += 2 * 3.0 * pace[0]

    def reduce() -> None:
        wall[0] += 0.8 * pace[0]

    def thread_time() -> float:
        own[0] += 1e-9 * pace[0]  # of the probe a nanosecond
        return own[0]

    monkeypatch.setattr(crowded_start.time, "thread_time", thread_time)
    rank = crowded_start._TakingTurns(0.2)
    monkeypatch.setattr(rank, "kernels", lambda: kernels)
    monkeypatch.setattr(rank, "small_reduce", lambda: reduce)
    monkeypatch.setattr(rank, "count", 2)
    monkeypatch.setattr(rank, "meet", lambda: None)
    assert rank.found()["crowded"] == pytest.approx(0.4)
    pace[0] = 3.0
    assert rank._round() * 1e-9 == pytest.approx(0.4, rel=1e-5)  # the processor is slower now


def test_a_processor_that_changes_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a while, longer in some rounds: it is half, or thrice, as fast then."""
    clock, pace = [0.0], [1.0]

    def now() -> float:
        clock[0] += 1e-3 * pace[0]
        return clock[0]

    monkeypatch.setattr(measurement.time, "perf_counter", now)
    monkeypatch.setattr(measurement, "_MATMULS", {"cpu": ((8, 8, 8),)})
    monkeypatch.setattr(measurement, "_MEMORY_NBYTES", 1 << 12)
    own, found = measurement._AllFigures._round, list[dict[str, float]]()
    for paces in ([1.0] * 5, [2.0, 1.0, 2.0, 1 / 3, 1.0], [2.0] * 5):
        rank, left = measurement._AllFigures(0.5), list(paces)

        def round_at_pace(rank: Any, left: list[float] = left) -> dict[str, float]:
            pace[0] = left.pop()
            return own(rank)

        monkeypatch.setattr(measurement._AllFigures, "_round", round_at_pace)
        found.append(rank.found())
    steady, changing, slow = found
    assert changing == pytest.approx(steady)
    assert slow["probe"] == pytest.approx(2 * steady["probe"])
    assert slow["launch"] == pytest.approx(2 * steady["launch"])
    assert slow["float32"] == pytest.approx(steady["float32"] / 2)
    assert slow["memory"] == steady["memory"]
