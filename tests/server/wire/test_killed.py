"""Real processes that are killed: a few seconds of what `benchmarks/soak_servers.py` does for ten minutes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import soak_servers
from benchmarks.soak_servers import Run, free_ports, soak


@pytest.mark.parametrize("sync", ["async", "bounded(1)"])
def test_workers_and_servers_that_are_killed_lose_nothing(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_servers, "PAUSE_SECONDS", (0.1, 0.4))
    run = Run(str(tmp_path), free_ports(2), sync, 2, 2**10)
    found = soak(2.0, run, random.Random(1))
    assert found["kills"] and found["acknowledged"]
