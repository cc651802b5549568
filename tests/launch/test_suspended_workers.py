"""Workers of servers that are stopped (SIGSTOP) for longer than their lease, and then go on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from served_runs import lines, on_one_device, pause, played, process_of, wait_for, wait_for_end


def test_under_step_it_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its rows."""

    def play(directory: Path) -> None:
        wait_for(directory, "worker0", 2)
        pause(directory, "worker1", 3.0)
        (directory / "go").touch()

    layout, wrong = "replica=2 server=1 sync=step", "worker1:3"
    code, said = played(tmp_path, layout, play, steps=6, wrong=wrong, TUTTI_LEASE="1")
    assert code == 0, said
    alone = on_one_device(tmp_path, 6, monkeypatch)
    expected = torch.tensor(lines(alone, "one", "step"))
    for who in ("worker0", "worker1"):
        found = torch.tensor(lines(tmp_path, who, "step"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_one_that_comes_back_after_the_end_of_the_run_hears_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for servers that do not come back, and the report blames nobody else."""
    awake = []

    def play(directory: Path) -> None:
        wait_for(directory, "worker1", 2)
        pid = process_of(directory, "worker1")
        os.kill(pid, signal.SIGSTOP)
        (directory / "go").touch()
        wait_for_end(directory, "worker0")
        wait_for_end(directory, "server0")
        os.kill(pid, signal.SIGCONT)
        awake.append(time.monotonic())

    layout, wrong = "replica=2 server=1 sync=async", "worker0:2,worker1:2"
    code, _ = played(tmp_path, layout, play, steps=4, wrong=wrong, TUTTI_LEASE="1")
    assert code == 0 and time.monotonic() - awake[0] < 30
    said = capfd.readouterr().err
    assert "rank 1 failed: RunOverError: server 0 has ended, since no worker was left" in said
    assert "this worker was suspended" in said and "went on without worker 1" in said
    assert "rank 0" not in said


def test_one_that_falls_silent_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is silent, and in the records of the run. Two servers notice it; later it goes on."""
    report = tmp_path / "report"
    report.mkdir()
    monkeypatch.setenv("TUTTI_REPORT", str(report))
    stopped: list[int] = []

    def play(directory: Path) -> None:
        for who in ("worker0", "worker1"):
            wait_for(directory, who, 2)
        stopped.append(process_of(directory, "worker1"))
        pause(directory, "worker1", 3.0)
        (directory / "go").touch()

    layout, wrong = "replica=2 server=2 sync=async", "worker0:2,worker1:2"
    code, said = played(tmp_path, layout, play, steps=4, wrong=wrong, TUTTI_LEASE="1")
    assert code == 0, said
    who = rf"worker 1 \(rank 1, process {stopped[0]} is stopped\)"
    line = rf"^{who} has been silent since \d\d:\d\d:\d\d, longer than its lease of 1 s: the others go on"
    said = capfd.readouterr().err
    assert len(re.findall(line, said, re.M)) == said.count("silent") == 1, said
    records = [json.loads(x) for x in (report / "launcher.jsonl").read_text().splitlines()]
    assert [bool(re.match(line, x["text"])) for x in records if x["kind"] == "said"] == [True]
    assert len(lines(tmp_path, "worker1", "step")) == 4
