"""A rank that loads a model on the meta device holds its shards, and little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import load_weights
from benchmarks.load_weights import WIDTH, loaded, write
from ranks import context

DEPTH = 16


def test_a_rank_holds_its_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = context()  # of a process that has imported: what it holds does not count
    monkeypatch.setattr(load_weights.multiprocessing, "get_context", lambda _method: copies)
    wanted = write(tmp_path, DEPTH)
    nbytes = 4 * WIDTH * WIDTH * DEPTH
    for one in loaded("data=2 zero=3", tmp_path, DEPTH):
        assert one.total == pytest.approx(wanted, rel=1e-5)
        assert 0.45 * nbytes < one.load_nbytes < 0.65 * nbytes
