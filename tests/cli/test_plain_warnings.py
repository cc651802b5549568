"""Warnings of commands: without lines of tutti's own, and with the user's."""

from __future__ import annotations

import os
from pathlib import Path

import forked
from tests.cli.test_plan import SCRIPT


def test_a_warning_of_a_command_has_no_line_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import warnings\nwarnings.warn('mine')\n" + SCRIPT)
    words = ["-m", "tutti", "simulate", "--layout", "data=3", "--devices", "3 x h100", script]
    done = forked.run(words, env={**os.environ}, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert "train.py:2: UserWarning: mine" in done.stderr
    (own,) = [line for line in told if line.startswith("warning: ")]
    assert own.startswith("warning: the 4 samples of batch tensor 0 do not divide by data=3")
    assert "simulated_run.py" not in done.stderr and "warn_of_uneven" not in done.stderr
