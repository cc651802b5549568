"""A run with servers that loads an earlier checkpoint: no gradient of the state before reaches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import forked

SCRIPT = Path(__file__).parent / "returning_script.py"


def played(directory: Path, layout: str, how: str) -> list[list[str]]:
    """What each process has written."""
    directory.mkdir()
    words = ["-m", "tutti", "run", "--layout", layout, str(SCRIPT), str(directory), how]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "60"}
    done = forked.run(words, env=env, cwd=directory, timeout=120)
    assert done.returncode == 0, done.stderr
    return [path.read_text().split() for path in sorted(directory.glob("worker*.txt"))]


@pytest.mark.parametrize("layout", ["replica=2 server=1", "replica=2 server=2"])
def test_workers_that_return_together_go_on_as_from_the_checkpoint(
    layout: str, tmp_path: Path
) -> None:
    expected = played(tmp_path / "a", f"{layout} sync=step", "goes on")
    found = played(tmp_path / "b", f"{layout} sync=step", "returns")
    assert found[0] == expected[0] and found[0][0] == "True"
    assert [float(x) for x in found[1][1:]] == pytest.approx([float(x) for x in found[0][1:]])


@pytest.mark.parametrize("sync", ["async", "bounded(2)"])
def test_no_late_gradient_reaches_the_loaded_state(sync: str, tmp_path: Path) -> None:
    """Worker 1 is three steps behind when worker 0 comes to its load."""
    found = played(tmp_path / "a", f"replica=2 server=1 sync={sync}", "returns")
    assert found[0][0] == "True"
