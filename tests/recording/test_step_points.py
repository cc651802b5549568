"""Few points for many steps: their means, and no step lost."""

from __future__ import annotations

import pytest

from tutti.recording import step_points
from tutti.recording.step_points import StepPoints


def rows(count: int) -> list[tuple[float, ...]]:
    """Steps 1, 2, ... that take `k` seconds each and return `10 k`."""
    return [(float(k), 0.5 * k, float(k), 10.0 * k) for k in range(1, count + 1)]


def test_a_short_run_keeps_every_step() -> None:
    assert StepPoints().joined(rows(50)) == [list(row) for row in rows(50)]


def test_points_double_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_points, "FULL", 4)
    made, left = StepPoints(), rows(37)
    found = [p for at in range(0, 37, 5) for p in made.joined(left[at : at + 5])]
    assert [p[0] for p in found] == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 36]
    assert found[4] == [6.0, 3.0, 5.5, 55.0]  # of steps 5 and 6: the last one's number and time
    assert found[-1] == [36.0, 18.0, 32.5, 325.0]
    assert made.rest() == [[37.0, 18.5, 37.0, 370.0]] and made.rest() == []
    assert sum(10 * p[2] == pytest.approx(p[3]) for p in found) == len(found)


def test_a_million_steps_are_some_67000_points() -> None:
    made, count = StepPoints(), 0
    for at in range(0, 1_000_000, 20_000):
        count += len(made.joined([(float(at + k), 0.0, 1.0) for k in range(20_000)]))
    assert 60_000 < count < 70_000
