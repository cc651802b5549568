"""Warnings of commands: with the user's lines, and without lines of tutti's own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import typer.core

import forked
from tests.cli.test_plan import SCRIPT
from tutti.cli import plain_warnings

# typer's own copy of click is in a folder below it.
CLICK = Path(typer.core.__file__).parent / "_click" / "core.py"


def test_a_warning_of_a_command_is_at_the_users_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import warnings\nwarnings.warn('mine')\n" + SCRIPT)
    words = ["-m", "tutti", "simulate", "--layout", "data=3", "--devices", "3 x h100", script]
    done = forked.run(words, env={**os.environ}, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train.py:2: UserWarning: mine" in done.stderr
    call = (
        script.read_text()
        .splitlines()
        .index("step(torch.randn(4, 32), torch.zeros(4, dtype=torch.long))")
    )
    said = (
        f"train.py:{call + 1}: UserWarning: the 4 samples of batch tensor 0 do not divide by data=3"
    )
    assert said in done.stderr, done.stderr
    assert "simulated_run.py" not in done.stderr and "warn_of_uneven" not in done.stderr


def test_one_without_such_a_line_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    plain_warnings.plain_warnings()
    for file in (plain_warnings.__file__, typer.core.__file__, str(CLICK)):
        assert warnings.formatwarning("text", UserWarning, file, 9) == "warning: text\n"
    assert "train.py:9: UserWarning: text" in warnings.formatwarning(
        "text", UserWarning, "train.py", 9
    )
