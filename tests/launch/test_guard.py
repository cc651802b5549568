"""What the launcher sees of its ranks' processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tutti.launch.guard import Guard

# Notes its number; then it ends as it is told.
RANK = """
import os, pathlib, signal, sys
os.setsid()
partial = pathlib.Path(sys.argv[1] + ".partial")
partial.write_text(str(os.getpid()))
partial.rename(sys.argv[1])
sys.stdin.read()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(3)", 3), ("sys.exit(0)", 0)],
)
def test_it_reads_how_a_rank_ended_and_leaves_that_to_read(
    end: str, code: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", RANK.format(end=end), str(tmp_path / "rank0.pid")]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE)
    until = time.monotonic() + 60.0
    with Guard(tmp_path, 1, ends_others=False) as guard:
        while not guard._pids and time.monotonic() < until:
            time.sleep(0.01)
        assert rank.stdin is not None
        rank.stdin.close()
        while guard.seen(0).ended is None and time.monotonic() < until:
            time.sleep(0.01)
        assert guard.seen(0).code == code
    assert rank.wait(60) == code
