"""What `python -m benchmarks.convergence` runs, in a few small steps."""

from __future__ import annotations

import pytest

from benchmarks import convergence
from benchmarks.convergence import OF_REPLICAS, OF_WORKERS, Outcome, Run


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "LOOK", 2)


def run(sync: str, replicas: int) -> Outcome:
    small = Run(sync, steps=6, batch=2, width=16, depth=1, heads=1, warm_up=2, replicas=replicas)
    return convergence.outcome(convergence.example(), small)


@pytest.mark.parametrize("sync", sorted({*OF_REPLICAS, *OF_WORKERS}))
def test_every_row_of_the_table_can_be_run(sync: str) -> None:
    found = run(sync.replace("after=300", "after=2"), 3)
    assert len(found.losses) == 3 and all(2.0 < x < 6.0 for x in found.losses)
    assert (found.age > 0) == sync.startswith("async")


@pytest.mark.parametrize("sync", ["average(every=1)", "async"])
def test_one_replica_or_worker_ends_where_one_program_does(sync: str) -> None:
    """On the way a worker may be two batches behind."""
    assert run(sync, 1).losses[-1] == pytest.approx(run("", 1).losses[-1], rel=1e-6)
