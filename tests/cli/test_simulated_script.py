"""`tutti simulate SCRIPT`: a step of a script on any devices, with faults, failures and workers."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_plan import SCRIPT
from tutti.cli.main import app
from tutti.quantities import format_seconds


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def simulate(script: Path, layout: str, *words: str, devices: str = "16 x h100") -> Any:
    given = ["simulate", "--layout", layout, "--devices", devices, *words, str(script)]
    return CliRunner().invoke(app, given)


def seconds(text: str, kind: str = "a step of") -> float:
    found = re.search(kind + r" ([\d.e+]+) (us|ms|s)", text)
    assert found is not None, text
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def test_a_slow_rank_and_slow_links_cost_time(script: Path) -> None:
    sound = simulate(script, "data=16", "--global-batch", "64")
    assert sound.exit_code == 0, sound.output
    slow = simulate(script, "data=16", "--global-batch", "64", "--straggler", "2")
    links = simulate(script, "data=16", "--global-batch", "64", "--slow-link", "0.001")
    assert seconds(slow.stdout) > 1.5 * seconds(sound.stdout)
    assert seconds(links.stdout) > seconds(sound.stdout)
    assert "times as long as without" in slow.stdout
    assert "times as long as without" not in sound.stdout


def test_a_pipeline_is_drawn_and_traced(script: Path, tmp_path: Path) -> None:
    words = [
        "--global-batch",
        "16",
        "--trace",
        str(tmp_path / "traces"),
        "--svg",
        str(tmp_path / "a.svg"),
    ]
    result = simulate(script, "data=2 pipe=2 micro=4", *words)
    assert result.exit_code == 0, result.output
    assert "rank 1" in result.stdout
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    files = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in files] == ["rank-0.json", "rank-2.json"]
    step, names = seconds(result.stdout), set[str]()
    for path in files:
        trace = json.loads(path.read_text())
        assert trace["distributedInfo"]["world_size"] == 4
        events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        kernels = [e for e in events if e["cat"] == "kernel"]
        launches = {e["args"]["correlation"] for e in events if e["cat"] == "cuda_runtime"}
        assert {e["args"]["correlation"] for e in kernels} == launches
        assert max(e["ts"] + e["dur"] for e in kernels) <= 1e6 * step * 1.01
        names |= {e["name"] for e in kernels}
        assert any("train.py:" in e["args"].get("line", "") for e in kernels)
        _assert_one_at_a_time([e for e in kernels if e["tid"] == 7])
    assert any(name.startswith("nccl") for name in names)  # sums over data
    assert any(name.startswith("ncclDevKernel_SendRecv ") for name in names)


def _assert_one_at_a_time(events: list[dict[str, Any]]) -> None:
    """A stream runs one kernel after the other."""
    ordered = sorted(events, key=lambda e: e["ts"])
    for before, after in pairwise(ordered):
        assert round(before["ts"] + before["dur"], 3) <= after["ts"]


def test_slow_links_of_a_pipeline_cost_messages(script: Path) -> None:
    """What a step takes longer is time of messages, not of the bubble."""
    steps, waits = [], []
    for words in ((), ("--slow-link", "0.001")):
        made = simulate(script, "data=8 pipe=2 micro=4", "--global-batch", "8192", *words)
        steps.append(seconds(made.stdout))
        waits.append(seconds(made.stdout, "messages"))
    assert steps[1] > 1.1 * steps[0]
    assert waits[1] - waits[0] > 0.9 * (steps[1] - steps[0])


def test_failures_have_a_best_interval(script: Path) -> None:
    result = simulate(script, "data=16", "--global-batch", "16", "--mtbf", "100")
    assert result.exit_code == 0, result.output
    assert re.search(r"save every [\d,]+ steps \([\d.]+ (min|h)\); goodput 9\d", result.stdout)
    assert "hardly" not in result.stdout


def test_a_save_longer_than_the_time_between_failures_is_told(script: Path) -> None:
    words = "--mtbf", "0.01", "--save-seconds", "30", "--restart-seconds", "1"
    result = simulate(script, "data=2", *words)
    assert result.exit_code == 0, result.output
    assert "a checkpoint takes 30 s, longer than the 18 s between failures" in result.stdout
    assert "a restart takes" not in result.stdout


@pytest.mark.parametrize(
    ("layout", "devices", "num"),
    [
        ("data=4", "64 x h100", 4),
        ("data=4 pipe=2", "64 x h100", 8),
        ("replica=2 server=1 sync=async", "64 x h100", 3),
        ("replica=2 server=1 sync=async", "2 x h100", 2),
    ],
)
def test_only_devices_at_work_fail(layout: str, devices: str, num: int, script: Path) -> None:
    result = simulate(script, layout, "--global-batch", "16", "--mtbf", "100", devices=devices)
    assert f"{num} devices at work, a failure every " in result.stdout, result.output
    assert f"a failure every {format_seconds(3600 * 100 / num)}: " in result.stdout


@pytest.mark.parametrize(
    ("sync", "text"),
    [("async", "updates old, 3 at most"), ("step", "gradients are 0 updates old, 0 at most")],
)
def test_workers_of_servers(sync: str, text: str, script: Path) -> None:
    result = simulate(script, f"replica=4 server=1 sync={sync}", "--global-batch", "16")
    assert result.exit_code == 0, result.output
    assert "updates a second" in result.stdout
    assert "pushes to servers and pulls from them have no bytes here" in result.stdout
    assert text in result.stdout


@pytest.mark.parametrize("sync", ["async", "bounded(2)"])
def test_a_slow_worker_counts_by_what_servers_take(sync: str, script: Path) -> None:
    """Servers that are busy anyway take as many updates a second, however slow one worker is."""
    layout, words = f"replica=8 server=1 sync={sync}", ["--global-batch", "16"]
    busy = [*words, "--serve-seconds", "0.1", "--straggler", "1.5"]
    made = simulate(script, layout, *busy)
    assert made.exit_code == 0, made.output
    assert "\n1 times as many updates a second as without the slow rank (10)" in made.stdout
    assert "a step of the slow worker takes 1.5 times as long" in made.stdout
    idle = simulate(script, layout, *words, "--straggler", "3").stdout
    found = re.search(r"\n([\d.]+) times as many updates a second as without", idle)
    assert found is not None and float(found[1]) < 1, idle


def test_a_step_that_does_not_fit_says_so(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(
        script.read_text()
        .replace("nn.Linear(32, 64)", 'nn.Linear(32, 1 << 28, device="meta")')
        .replace("nn.Linear(64, 8)", 'nn.Linear(1 << 28, 8, device="meta")')
    )
    made = simulate(path, "", devices="1 x h100")
    assert made.exit_code == 0, made.output
    found = re.search(
        r"does not fit: needs (\S+) GB more on a device, which has 73.6 GB", made.stdout
    )
    peak = re.search(r"peak memory (\S+) GB", made.stdout)
    assert found is not None and peak is not None, made.output
    assert float(found[1]) == pytest.approx(float(peak[1]) - 73.6, abs=0.6)
    assert "does not fit" not in simulate(script, "").stdout


def test_slow_links_that_no_rank_uses_are_told(script: Path) -> None:
    made = simulate(script, "data=4", "--slow-link", "0.5", devices="4 x h100")
    assert "--slow-link 0.5 changes nothing: no rank of this layout sends to another" in made.stdout
    assert "times as long" not in made.stdout
    both = simulate(script, "data=4", "--slow-link", "0.5", "--straggler", "2").stdout
    assert "changes nothing" in both and "as long as without the slow rank (" in both


def test_rounds_of_replicas_cost_time_and_bytes(script: Path, tmp_path: Path) -> None:
    alone = simulate(script, "data=1", "--global-batch", "4")
    words = ("--global-batch", "16", "--trace", str(tmp_path / "traces"))
    result = simulate(script, "replica=4 sync=average(every=2)", *words)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"1 trace, of one rank, of a step of .*s without a round of the", result.stdout
    )
    assert seconds(result.stdout) > seconds(alone.stdout)
    assert ", rounds " in result.stdout and "sent by a rank: nothing" not in result.stdout
    assert "replicas agree by average(every=2): for each step" in result.stdout
    assert "updates old" not in result.stdout


def test_a_hundred_thousand_ranks(script: Path) -> None:
    result = simulate(
        script, "data=100000 zero=1", "--global-batch", "100000", devices="100000 x h100"
    )
    assert result.exit_code == 0, result.output
    assert "between" in result.stdout


@pytest.mark.parametrize(
    ("layout", "words", "devices", "text"),
    [
        ("data=16", [], "8 x h100", "there are 8 devices"),
        ("data=2", ["--schedule", "zb"], "8 x h100", "do not go with a script"),
        ("data=2", [], "", "needs devices"),
        ("auto", [], "8 x h100", "tutti run and tutti.distribute alone take it"),
        ("data=2", ["--svg", "no/x.svg"], "2 x h100", "cannot write the image no/x.svg"),
        (
            "data=2",
            ["--trace", "/dev/null/x"],
            "2 x h100",
            "no trace can be written to /dev/null/x",
        ),
        ("data=2", ["--mtbf", "1e-7"], "2 x h100", "fails every 180 us never saves"),
        ("data=2 zero=9", [], "2 x h100", "not a level of ZeRO"),
    ],
)
def test_bad_input(layout: str, words: list[str], devices: str, text: str, script: Path) -> None:
    result = simulate(script, layout, *words, devices=devices)
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("data=3", "the 4 samples of batch tensor 0 do not divide by data=3"),
        ("micro=3", "micro=3 does not divide each rank's samples"),
    ],
)
def test_a_batch_that_does_not_divide_warns_as_in_a_run(
    layout: str, text: str, script: Path
) -> None:
    with pytest.warns(UserWarning, match=text):
        assert simulate(script, layout).exit_code == 0


def test_a_batch_that_replicas_cannot_share_is_refused_as_in_a_run(script: Path) -> None:
    made = simulate(script, "replica=3 sync=average(every=2)")
    assert made.exit_code == 2 and 'over axis "replica" (size 3)' in made.stderr


def test_nothing_to_simulate() -> None:
    result = CliRunner().invoke(app, ["simulate"])
    assert result.exit_code == 2
    assert "nothing to simulate" in result.stderr
