"""The summary of traces: means over calls and ranks, sums by op and line, the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import TuttiError
from tutti.report.trace_summary import MOST_ROWS, trace_summary


def event(
    name: str, category: str, ts: float, dur: float, pid: int, **shown: Any
) -> dict[str, Any]:
    """One event of a trace, in microseconds."""
    return {
        "ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "pid": pid, "tid": 0,
        "args": shown,
    }  # fmt: skip


def write(folder: Path, pid: int, more: list[dict[str, Any]]) -> None:
    """A rank with two calls of 1 ms: a matmul of 400 us, and a gather of 100 us on rank 0, 300 on rank 1."""
    every = []
    for k in range(2):
        at = 5000.0 * k
        gather = 100.0 if pid == 0 else 300.0
        every += [
            event(f"step {k}, program 1", "step", at, 1000.0, pid, step=k, program=1),
            event("mm", "forward", at + 10, 400.0, pid, line="/x/model.py:7", region="forward"),
            event("all_gather", "collective", at + 500, gather, pid, line="/x/model.py:9",
                  region="backward", axes="data", nbytes=4000),
        ]  # fmt: skip
    (folder / f"rank-{pid}.json").write_text(json.dumps({"traceEvents": every + more}))


def rows(text: str, num: int = 4) -> list[list[str]]:
    """The cells of the table."""
    return [re.split(r"  +", line) for line in text.splitlines()[-num:]]


def test_means_over_calls_and_ranks(tmp_path: Path) -> None:
    for pid in range(2):
        write(tmp_path, pid, [event("mm", "forward", 4000.0, 500.0, pid, line="outside.py:1")])
    text = trace_summary(tmp_path)
    assert text.startswith("profile: 2 calls of 1 ms on each of 2 ranks")
    assert rows(text) == [
        ["ms", "share", "count", "op", "line"],
        ["0.4", "40 %", "1", "mm", "model.py:7 forward"],
        ["0.2", "20 %", "1", "all_gather over data, 4 kB", "model.py:9 backward"],
        ["0.4", "40 %", "between ops"],
    ]


def test_a_message_within_an_op_counts_once(tmp_path: Path) -> None:
    """A send within the op that posts the value; the rows and the rest are the step."""
    for pid in range(2):
        write(tmp_path, pid, [])
    outer = [event("post forward", "forward", 600.0, 300.0, pid=0, line="a.py:1")]
    inner = [event("send F0 to stage 1", "collective", 650.0, 240.0, pid=0, line="a.py:1")]
    write(tmp_path, 0, outer + inner)
    found = {row[3]: float(row[0]) for row in rows(trace_summary(tmp_path), 6)[1:-1]}
    assert found["post forward"] == 60.0 / 4000
    assert found["send F0 to stage 1"] == 240.0 / 4000
    assert float(rows(trace_summary(tmp_path), 6)[-1][0]) == 0.4 - 0.3 / 4


def test_a_joined_collective_says_of_how_many_tensors(tmp_path: Path) -> None:
    shown = {"line": "a.py:1", "axes": "data", "nbytes": 8000}
    joined = event("all_reduce", "collective", 600.0, 200.0, 0, region="update", tensors=3, **shown)
    alone = event("all_reduce", "collective", 900.0, 20.0, 0, region="update", tensors=1, **shown)
    write(tmp_path, 0, [joined, alone])
    text = trace_summary(tmp_path)
    assert "all_reduce of 3 tensors over data, 4 kB  a.py:1 update" in text
    assert "all_reduce over data, 4 kB               a.py:1 update" in text


def test_other_files_of_the_folder_are_no_traces(tmp_path: Path) -> None:
    write(tmp_path, 0, [])
    (tmp_path / "verify.json").write_text("{}")
    assert trace_summary(tmp_path).startswith("profile: 2 calls")


def test_many_ops_end_in_one_row(tmp_path: Path) -> None:
    many = [event(f"op{k}", "update", 600.0 + k, 1.0, 0, line="a.py:1") for k in range(MOST_ROWS)]
    write(tmp_path, 0, many)
    text = trace_summary(tmp_path)
    assert "others" in text and len(text.splitlines()) == 2 + MOST_ROWS + 2


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuttiError, match="no trace in"):
        trace_summary(tmp_path)
    (tmp_path / "rank-0.json").write_text("[")
    with pytest.raises(TuttiError, match="is no trace"):
        trace_summary(tmp_path)
