"""Runs of several processes with a report: those that end well, fail, are killed, go on; and their pages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import forked
from html_pages import Page

SCRIPT = """\
import os, signal, sys, time, torch, tutti

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

way, num_steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
run = tutti.Checkpoints("saved", every=4, step=step) if way == "save" else None
if run is not None:
    run.restore()
last = os.environ.get("RANK") == "1"
for k in range(num_steps):
    if k == 9 and last and way == "raise":
        raise ValueError("<b>no</b>")
    if k == 9 and last and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    step(torch.full((8, 8), float("nan") if way == "nan" and k == 5 else 0.5))
    if run is not None:
        run.tick()
"""


def run(
    folder: Path, layout: str, way: str, num_steps: int = 12, *options: str
) -> tuple[Any, Page]:
    """The end of `tutti run --report`, and its page."""
    (folder / "train.py").write_text(SCRIPT)
    words = ["-m", "tutti", "run", "--layout", layout, "--report", "out", *options, "train.py"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = forked.run([*words, way, str(num_steps)], env=environment, cwd=folder, timeout=120)
    assert "report: out/report.html" in done.stderr, done.stderr
    return done, Page((folder / "out/report.html").read_text())


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(x) for x in file.read_text().splitlines()]


def header(page: Page) -> str:
    """The words at the head of a page."""
    return page.find("header")[0].all_text()


def test_a_run_that_ends_well_has_one_line_and_a_page(tmp_path: Path) -> None:
    done, page = run(tmp_path, "data=2 zero=1", "plain", 12, "--profile", "out")
    assert done.returncode == 0
    told = [x for x in done.stderr.splitlines() if x.startswith("step ")]
    assert len(told) == 1 and " measured; peak memory " in told[0]
    assert "USDT" not in done.stderr and "unknown size" not in done.stderr
    assert "Ended well" in header(page) and "data=2 zero=1" in header(page)
    sections = [s.attributes["id"] for s in page.find("section")]
    assert {"loss", "time", "timeline", "memory", "tensors", "collectives"} <= set(sections)
    measured = page.tables("timeline")["The measured step"]
    assert [r["rank"] for r in measured] == ["rank 0", "rank 1"]
    by_line = next(
        rows for caption, rows in page.tables("collectives").items() if "by line" in caption
    )
    assert any(r["measured"] and r["bytes sent"] for r in by_line)
    kinds = [r["kind"] for r in lines(tmp_path / "out/launcher.jsonl")]
    assert kinds[:2] == ["begin", "run"] and kinds[-2:] == ["ended", "end"]


def test_a_rank_that_raises(tmp_path: Path) -> None:
    done, page = run(tmp_path, "data=2", "raise")
    assert done.returncode == 1 and "Failed, exit code 1" in header(page)
    words = page.section("run").all_text()
    assert "rank 1 failed: ValueError: <b>no</b>; rank 0 waited in" in words
    steps = [
        p for r in lines(tmp_path / "out/rank-0.jsonl") if r["kind"] == "steps" for p in r["points"]
    ]
    assert [p[0] for p in steps] == list(
        range(1, 10)
    )  # none is lost, though rank 0 was told to stop


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    done, page = run(tmp_path, "data=2", "kill")
    assert done.returncode == 1 and "Failed, exit code 1" in header(page)
    assert "rank 1 died (signal 9)" in page.section("events").all_text()


def test_nan_is_among_the_events(tmp_path: Path) -> None:
    done, page = run(tmp_path, "data=2", "nan")
    assert done.returncode == 0 and "Step 6 returned nan as loss." in page.section("run").all_text()
    (events,) = page.tables("events").values()
    nans = [r for r in events if r["event"] == "nan" and r["process"] == "rank 0"]
    assert [r["what"].partition(" as ")[0] for r in nans] == [
        f"step {k} returned nan" for k in range(6, 13)
    ]


def test_a_run_that_goes_on_in_its_folder(tmp_path: Path) -> None:
    _, page = run(tmp_path, "data=2", "save", 10)
    (events,) = page.tables("events").values()
    assert [r["what"].split(" into")[0] for r in events if r["event"] == "save"] == [
        "step 4",
        "step 8",
    ]
    _, page = run(tmp_path, "tensor=2", "save", 6)
    (events,) = page.tables("events").values()
    assert [r["what"].split(" from")[0] for r in events if r["event"] == "restore"] == ["step 8"]
    (rows,) = page.tables("loss").values()
    assert [int(r["step"]) for r in rows] == list(range(1, 15))
    (earlier,) = page.tables("run")["Earlier starts in this folder"]
    assert (earlier["layout"], earlier["steps"]) == ("data=2", "1 to 10")
    anew, page = run(tmp_path, "", "plain", 5)
    (rows,) = page.tables("loss").values()
    assert anew.returncode == 0 and [int(r["step"]) for r in rows] == list(range(1, 6))
    assert page.tables("run")["Earlier starts in this folder"][1]["steps"] == "9 to 14"


def test_workers_of_servers(tmp_path: Path) -> None:
    done, page = run(tmp_path, "replica=2 server=1 sync=async", "plain")
    assert done.returncode == 0, done.stderr
    files = {p.name for p in (tmp_path / "out").glob("*.jsonl")}
    assert files == {"launcher.jsonl", "worker-0.jsonl", "worker-1.jsonl"}
    variables = page.tables("tensors")["Variables on servers"]
    assert [r["variable"] for r in variables] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "replica 1" in page.section("loss").find("svg")[0].all_text()


def test_a_pipeline_has_the_memory_of_each_rank_and_its_schedule(tmp_path: Path) -> None:
    done, page = run(tmp_path, "pipe=2 micro=2", "plain")
    assert done.returncode == 0, done.stderr
    assert [r["rank"] for r in page.tables("memory")["Predicted memory"]] == ["rank 0", "rank 1"]
    text = page.section("timeline").find("svg")[0].all_text()
    assert "pipe 0" in text and "1B1" in text


@pytest.mark.parametrize("name", ["file/x", "file"])
def test_a_folder_that_cannot_be_written_starts_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    words = ["-m", "tutti", "run", "--report", name, "train.py"]
    done = forked.run(words, env=dict(os.environ), cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and not (tmp_path / "ran").exists()


def test_a_verdict_is_kept_and_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [
        "-m",
        "tutti",
        "verify",
        "--report",
        "out",
        "--layout",
        "data=2",
        "train.py",
        "plain",
        "3",
    ]
    done = forked.run(words, env=dict(os.environ), cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "out/verify.json").read_text())
    assert kept["ok"] is True and kept["text"] == done.stdout.strip()
    words = ["-m", "tutti", "report", "out"]
    done = forked.run(words, env=dict(os.environ), cwd=tmp_path, timeout=60)
    assert done.stdout.strip() == "out/report.html"
    page = Page((tmp_path / "out/report.html").read_text())
    assert "The same step, under data=2." in page.section("verify").all_text()
