"""Lines are whole, JSON, and those of one process; a full disk ends them and not the run."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from tutti.environment import REPORT
from tutti.errors import TuttiError
from tutti.recording import run_writer
from tutti.recording.report_folder import check_report_folder, process_name
from tutti.recording.run_writer import RunWriter, note, writer


def refuse(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def kinds(file: Path) -> list[str]:
    """The kinds of all lines, which must be JSON as others read it."""
    lines = file.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse)["kind"] for line in lines]


def test_a_file_begins_with_its_process_and_ends_with_its_end(tmp_path: Path) -> None:
    made = RunWriter(tmp_path, "worker 0.1")
    assert not made.path.exists()
    made.write("nan", value=math.nan, values=[math.inf, {"x": -math.inf}], text="<b>\x00\ud800")
    made.end()
    assert kinds(tmp_path / "worker-0.1.jsonl") == ["begin", "nan", "end"]
    told = json.loads(made.path.read_text().splitlines()[1])
    assert (told["value"], told["values"]) == ("nan", ["inf", {"x": "-inf"}])


def test_a_process_without_records_has_no_file(tmp_path: Path) -> None:
    RunWriter(tmp_path, "rank 0").end()
    assert list(tmp_path.iterdir()) == []


def test_the_line_that_a_kill_has_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"kind":"begin"}\n{"kind":"ste')
    RunWriter(tmp_path, "rank 0").write("step")
    lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert lines[1] == '{"kind":"ste' and [json.loads(x)["kind"] for x in lines[2:]] == [
        "begin",
        "step",
    ]


def test_a_full_disk_ends_the_records_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunWriter(tmp_path, "rank 0")
    made.write("step")
    whole = made.path.read_bytes()

    def full(_fd: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_writer.os, "write", full)
        with pytest.warns(UserWarning, match="no more records of this run.*No space left"):
            made.write("steps")
        made.write("steps")
        made.end()
    made.write("steps")
    assert made.path.read_bytes() == whole


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    made = RunWriter(tmp_path, "rank 0")
    made.write("step")
    child = os.fork()
    if child == 0:
        made.write("child")
        made.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert kinds(made.path) == ["begin", "step"]


def test_only_the_leading_process_notes_what_all_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REPORT.name, raising=False)
    note("save", step=1)
    assert writer() is None
    monkeypatch.setenv(REPORT.name, str(tmp_path / "new"))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        note("save", step=1)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["rank-0.jsonl"]
    monkeypatch.setenv("TUTTI_ROLE", "worker 3")
    assert process_name() == "worker 3"


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_report_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(TuttiError, match="no report can be written to"):
        check_report_folder(tmp_path / "file" / "x")
    monkeypatch.setenv(REPORT.name, str(tmp_path / "file" / "x"))
    with pytest.raises(TuttiError, match="no report can be written to"):
        writer()
