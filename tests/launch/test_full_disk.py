"""A rank on a full disk cannot write its record: the cause of its end must not be lost in that."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tutti.launch import worker
from tutti.launch.script import Script


def test_a_cause_that_cannot_be_recorded_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker, "write_record", full)
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('a batch of the wrong kind')\n")
    try:
        assert worker._run(Script(str(script)), [], 0, tmp_path) == 1
    finally:
        worker._ending.clear()
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "ValueError: a batch of the wrong kind"
    assert "No space left" not in said
