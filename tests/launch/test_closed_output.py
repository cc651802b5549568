"""A rank whose output goes nowhere ends as plain Python does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.environment import RUN_DIR
from tutti.launch.records import Exit, read_record

RUN_SECONDS = 60.0


@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (
            ">/dev/full",
            120,
            "the end of <stdout> is lost: OSError: [Errno 28] No space left on device\n",
        ),
        (">/dev/full 2>&1", 120, ""),
    ],
)
def test_output_that_cannot_be_written(to: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('loss 0.1', end='')\n")
    words = ["sh", "-c", f'exec "$@" {to}', "sh", sys.executable, "-m", "tutti.launch.worker"]
    environment = {**os.environ, "RANK": "0", RUN_DIR.name: str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)  # it would write at once
    ended = subprocess.run(
        [*words, str(script)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (code, said)
    noted = read_record(tmp_path, Exit, 0)
    assert noted is not None and noted.code == code
