"""A rank killed in the middle of a run of `distribute`: all stop, and the report says who and where."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from forked import Forked
from launch.processes import MOST_SECONDS, lives

SCRIPT = Path(__file__).parent / "killed.py"
LINES = SCRIPT.read_text().splitlines()
FIRST, LAST = (
    1 + next(i for i, line in enumerate(LINES) if f"# train_step {word}" in line)
    for word in ("begins", "ends")
)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "meet", "buffer")
MESSAGES = ("send", "recv")
STOP_SECONDS = MOST_SECONDS + 10.0  # the victim waits until the others sleep
START_SECONDS = 60.0


@pytest.mark.parametrize("layout", ["data=3 zero=3", "pipe=2 micro=3"])
def test_the_report_names_rank_collective_and_line(layout: str, tmp_path: Path) -> None:
    words = ["-m", "tutti", "run", "--layout", layout, str(SCRIPT), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = Forked(words, env=env, cwd=Path.cwd())
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("rank 0 at step 3"), process.communicate(timeout=5)
        begin = time.monotonic()
        _, err = process.communicate(timeout=START_SECONDS)
    finally:
        process.kill()
    assert time.monotonic() - begin < STOP_SECONDS
    assert process.returncode == 1
    num_ranks = int(layout[5])
    report = next(line for line in err.splitlines() if line.startswith("CommError"))
    assert f"rank {num_ranks - 1} died (signal 9)" in report
    over, names = ("1 -> 0", MESSAGES) if "pipe" in layout else ("data", COLLECTIVES)
    waits = re.findall(
        rf"rank (\d) waited in (\w+) over {over} \([\d.]+ k?M?B\) at (\S+):(\d+)", report
    )
    assert [int(wait[0]) for wait in waits] == list(range(num_ranks - 1)), report
    for _, name, file, line in waits:
        assert name in names
        assert file.endswith("killed.py") and FIRST <= int(line) <= LAST, report
    assert "Traceback" not in err
    pids = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
    assert len(pids) == num_ranks
    assert not [pid for pid in pids if lives(pid)]
