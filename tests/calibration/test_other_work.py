"""A calibration or a plan beside other work warns."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tutti.calibration import other_work
from tutti.calibration.other_work import PLAN, busy_processors, warn_of_other_work


def stat(path: Path, busy: int, idle: int) -> None:
    """As Linux writes it: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    path.write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 7 0\ncpu0 1 2 3\n")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of four processors that are idle until a look begins, and then as `host` says."""
    monkeypatch.setattr(other_work.os, "cpu_count", lambda: 4)
    path, later = tmp_path / "stat", tmp_path / "later"
    stat(path, 1000, 1000)
    monkeypatch.setattr(other_work, "_TIMES", path)
    monkeypatch.setattr(other_work.time, "sleep", lambda _: later.replace(path))
    return later


def test_busy_processors_are_counted(host: Path) -> None:
    stat(host, 1075, 1025)
    assert busy_processors(0.5) == pytest.approx(3.0)


@pytest.mark.parametrize(("busy", "warns"), [(3, False), (30, True)])
def test_only_other_work_is_a_warning(host: Path, busy: int, warns: bool) -> None:
    stat(host, 1000 + busy, 1100 - busy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_other_work(PLAN)
    assert len(found) == warns
    if warns:
        assert "other work keeps 1.2 of 4 processors busy" in str(found[0].message)
        assert "Plan again" in str(found[0].message)


def test_a_host_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_work, "_TIMES", tmp_path / "missing")
    assert busy_processors(0.0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_work(PLAN, 0.0)
