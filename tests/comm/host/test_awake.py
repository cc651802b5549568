"""A clock that stands still while its process does."""

from __future__ import annotations

import pytest

from tutti.comm.host.awake import AwakeClock


def test_only_what_a_running_process_would_see_counts() -> None:
    now = [100.0]
    clock = AwakeClock(0.5, lambda: now[0])
    assert clock.look() == 0.0
    for passed, total in [(0.2, 0.2), (0.5, 0.7), (3600.0, 1.2), (0.0, 1.2), (0.1, 1.3)]:
        now[0] += passed
        assert clock.look() == pytest.approx(total)
