"""`tutti plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import forked
import tutti
from tests.planning.test_hardware_files import FOUND
from tutti.calibration import other_work
from tutti.cli import plan_layouts
from tutti.cli.main import app
from tutti.planning import hardware_files, plan_progress
from tutti.planning.plan_file import Plan

SCRIPT = """
import torch, tutti
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())

def train_step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

step = tutti.distribute(train_step, model, optimizer)
step(torch.randn(4, 32), torch.zeros(4, dtype=torch.long))
raise SystemExit("the step ran")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def plan(script: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words, str(script)])


@cache
def records(script: Path, *words: str) -> list[dict[str, Any]]:
    result = plan(script, "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_layout_is_ranked(script: Path) -> None:
    found = records(script, "--devices", "2 x h100")
    seconds = [row["seconds"] for row in found]
    assert seconds == sorted(seconds)
    assert all(row["fits"] and row["peak_nbytes"] > 0 for row in found)
    layouts = [row["layout"] for row in found]
    assert {"", "data=2", "data=2 zero=3", "pipe=2 micro=2", "pipe=2 micro=4 schedule=zb"} <= set(
        layouts
    )
    assert len(set(layouts)) == len(layouts)


def test_the_table_has_all_columns(script: Path) -> None:
    words = "--devices", "2 x h100", "--layout", "micro=1 remat=none"
    result = plan(script, *words, "--why", "--top", "3")
    assert result.exit_code == 0, result.output
    head = result.stdout.split("\n")[0]
    for word in ("layout", "step", "samples/s", "MFU", "peak memory", "bound by"):
        assert word in head
    assert "times as fast as" in result.stdout
    assert re.search(r"\n  compute .*\n    launches +[\d.]+ us", result.stdout), result.stdout
    assert "more that fit" in result.stdout


def test_a_long_plan_says_how_far_it_is(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--devices", "2 x h100", "--layout", "data=2 micro=1 remat=none"
    assert "planning" not in plan(script, *words).output
    monkeypatch.setattr(plan_progress, "_SECONDS_BETWEEN", 0.0)
    result = plan(script, *words, "--json")
    assert re.search(r"planning: layout 1 of \d+\n", result.stderr)
    assert json.loads(result.stdout)


def test_a_larger_batch(script: Path) -> None:
    words = "--devices", "4 x h100", "--layout", "data=4 micro=1 remat=none"
    few = {r["layout"]: r for r in records(script, *words)}
    many = {r["layout"]: r for r in records(script, *words, "--global-batch", "4096")}
    assert many.keys() == few.keys() == {"data=4", "data=4 zero=1", "data=4 zero=3"}
    assert many["data=4"]["peak_nbytes"] > few["data=4"]["peak_nbytes"]


def test_two_layouts_side_by_side(script: Path) -> None:
    words = "--devices", "4 x h100", "--layout", "data=4 micro=1 remat=none", "--diff"
    result = plan(script, *words, "data=4 zero=3", "data=4")
    assert result.exit_code == 0, result.output
    assert "data=4 zero=3" in result.stdout.split("\n")[0]


def test_two_layouts_have_the_words_that_all_have(script: Path) -> None:
    words = "--devices", "4 x h100", "--layout", "precision=bf16 micro=1", "--json", "--diff"
    made = plan(script, *words, "data=4", "data=4 zero=3 precision=bf16")
    assert made.exit_code == 0, made.output
    found = [row["layout"] for row in json.loads(made.stdout)]
    assert found == ["data=4 precision=bf16", "data=4 zero=3 precision=bf16"]


def test_two_layouts_are_estimated_alone(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of the table."""
    words = "--devices", "4 x h100", "--layout", "micro=1 remat=none"
    table = {row["layout"]: row for row in records(script, *words)}
    monkeypatch.setattr(plan_progress, "_SECONDS_BETWEEN", 0.0)
    made = plan(script, *words, "--json", "--diff", "data=2 tensor=2", "data=4 zero=3")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout) == [table["data=2 tensor=2"], table["data=4 zero=3"]]
    assert set(re.findall(r"layout \d+ of (\d+)", made.stderr)) == {"2"}
    alike = plan(script, *words, "--json", "--diff", "data=4", "data=4")
    assert json.loads(alike.stdout) == [table["data=4"]] * 2


def test_layouts_that_a_plan_lacks_are_refused_before_the_estimates(
    script: Path, tmp_path: Path
) -> None:
    path = tmp_path / "never.py"
    path.write_text("raise SystemExit('the script ran')")
    words = "--devices", "4 x h100", "--diff"
    ranks = plan(path, *words, "data=8", "data=4")
    assert ranks.exit_code == 2 and "the layouts of this plan have 1 or 4" in ranks.stderr
    assert '--devices "8 x ..."' in ranks.stderr
    saved = plan(path, *words, "data=4", "", "--save", str(tmp_path / "a.plan"))
    assert saved.exit_code == 2 and "--save does not go with --diff" in saved.stderr
    other = plan(script, *words, "data=4 micro=3", "data=4")
    assert other.exit_code == 2
    assert 'no estimate of layout "data=4 micro=3"' in other.stderr
    assert "it is not among the layouts" in other.stderr


def test_a_layout_with_a_word_that_does_nothing_is_not_listed(tmp_path: Path) -> None:
    """SGD without momentum has no slots that zero=1 could split; one linear layer recomputes nothing."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("AdamW(model.parameters())", "SGD(model.parameters(), lr=0.1)"))
    words = "--devices", "2 x h100", "--layout", "data=2 micro=1"
    found = {r["layout"]: r for r in records(path, *words)}
    assert {"data=2", "data=2 zero=1", "data=2 remat=full"} <= found.keys()
    assert found["data=2"]["seconds"] == found["data=2 zero=1"]["seconds"]
    text = plan(path, *words, "--why").stdout
    table = text.partition("\n\n")[0].splitlines()
    assert "the same with" in table[0] and len(table) < 1 + len(found)
    row = next(line for line in table if re.match(r"\d+ +data=2  ", line))
    assert row.endswith("zero=1, remat=full, 1 more") or row.endswith("zero=1")
    assert not any("data=2 zero=1" in line for line in table)
    assert "is 1 times as fast" not in text  # the runner-up is another layout
    told = plan(path, *words, "--diff", "data=2", "data=2 zero=1").stdout
    assert told.endswith("are equal: they take the same time and memory, and send as many bytes.\n")


def test_given_words_are_kept(script: Path) -> None:
    found = records(
        script, "--devices", "2 x h100", "--layout", "zero=1 precision=bf16 micro=2 remat=none"
    )
    words = [set(r["layout"].split()) for r in found]
    assert {"data=2", "zero=1", "micro=2", "precision=bf16"} in words
    assert {"micro=2", "precision=bf16"} in words  # one device
    assert all({"precision=bf16", "micro=2"} <= one for one in words)


def test_the_precision_varies_where_the_user_asks_for_it(script: Path) -> None:
    words = "--devices", "2 x h100", "--layout", "data=2 zero=0 micro=1 remat=none"
    found = {r["layout"] for r in records(script, *words, "--vary-precision")}
    assert found == {"data=2", "data=2 precision=bf16"}
    text = plan(script, *words, "--vary-precision").stdout
    assert "in fp32 and " in text and "in bf16 FLOP/s" in text and "Not tried" not in text
    assert "Not tried: precision=bf16, another computation" in plan(script, *words).stdout
    given = (*words[:3], words[3] + " precision=bf16")
    assert "Not tried" not in plan(script, *given).stdout


@pytest.mark.parametrize("command", ["plan", "verify", "explain", "serve"])
def test_auto_is_refused_by_commands_that_choose_no_layout(command: str, script: Path) -> None:
    made = CliRunner().invoke(app, [command, "--layout", "auto data=2", str(script)])
    assert made.exit_code == 2 and 'LayoutError: "auto" in layout "auto data=2"' in made.stderr
    assert "tutti run and tutti.distribute alone take it" in made.stderr


@pytest.fixture
def own_default_device() -> Iterator[None]:
    """A script that runs in this process may set another; it stays set for the tests after it."""
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("own_default_device")
def test_a_plan_tells_arithmetic_from_launches(script: Path, tmp_path: Path) -> None:
    words = "--devices", "2 x h100", "--layout", "data=2 micro=1 remat=none"
    shares = r"(\d+)% is in kernels that arithmetic bounds, (\d+)% in .*? and (\d+)% in those"
    small = plan(script, *words).stdout
    told = re.search(shares, " ".join(small.split()))
    assert told is not None and int(told[1]) < 10 and int(told[3]) > 80, small
    assert "launches" in small.splitlines()[2]  # bound by
    path = tmp_path / "wide.py"
    large = SCRIPT.replace("32, 64", "8192, 8192").replace("64, 8)", "8192, 8192)")
    path.write_text(
        large.replace("torch.manual_seed(0)", 'torch.set_default_device("meta")')
        .replace("randn(4, 32)", "randn(1 << 16, 8192)")
        .replace("zeros(4,", "zeros(1 << 16,")
    )
    wide = plan(path, *words)
    told = re.search(shares, " ".join(wide.stdout.split()))
    assert told is not None and int(told[1]) > 60 and int(told[3]) < 5, wide.output


def test_no_footer_explains_figures_of_no_layout(script: Path) -> None:
    words = "--devices", "2 x h100", "--layout", "data=2 micro=1"
    assert "MFU" in plan(script, *words).stdout
    small = plan(script, *words, "--memory", "1kB")
    assert "do not fit 1 kB" in small.stdout and "MFU" not in small.stdout


def test_a_plan_is_saved(script: Path, tmp_path: Path) -> None:
    words = "--devices", "2 x h100", "--layout", "micro=1 remat=none"
    result = plan(script, *words, "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    made = Plan.read(tmp_path / "plan.json")
    first = records(script, *words)[0]
    assert (made.layout, made.seconds) == (first["layout"], first["seconds"])
    assert made.model.startswith("Sequential, 2632 parameters")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["--devices", "4 x h100", "--save", "no/x"],
            ["cannot write the plan no/x", "No such file"],
        ),
        (["--devices", "4 x h1000"], ['unknown device "h1000"', "h100", "did you mean"]),
        (["--devices", "h100 x 4 x"], ["unknown device"]),
        (["--devices", " "], ["--devices is empty", "this machine"]),
        (["--devices", "-2 x h100"], ["is -2 devices", 'such as "64 x h100"']),
        (["--devices", "99999999999 x h100"], ["is 99999999999 devices", "1 to 10,000,000"]),
        (["--devices", "2 x h100", "-n", "4"], ["layouts of 4 ranks on 2 devices", "-n 2"]),
        (
            ["--devices", "2 x h100", "--layout", "data=2 micro=1", "--memory", "1kB"],
            ["no layout fits", "more on a device"],
        ),
        (["--devices", "4 x h100", "--memory", "lots"], ["cannot read"]),
        (["--vary-precision", "--layout", "precision=bf16"], ["names one", "leave one of the two"]),
        (["--devices", "4 x h100", "--layout", "data=3"], ["does not divide 4 devices"]),
        (["--devices", "4 x h100", "--layout", "dat=4"], ["unknown word"]),
        (["--devices", "3 x h100", "--layout", "data=3"], ["no layout divides 4 samples"]),
        (["--devices", "4 x h100", "--layout", "replica=2 sync=average(every=2)"], ["replicas"]),
    ],
)
def test_bad_input_is_refused(words: list[str], texts: list[str], script: Path) -> None:
    result = plan(script, *words)
    assert result.exit_code == 2
    for text in texts:
        assert text in result.stderr


def test_a_layout_of_the_script_does_not_follow_the_plan(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--devices", "1 x h100", "--layout", "micro=1 remat=none"
    assert plan(script, *words, "--save", str(tmp_path / "plan.json")).exit_code == 0
    monkeypatch.setenv("TUTTI_PLAN", str(tmp_path / "plan.json"))
    model = torch.nn.Linear(2, 2)
    given = lambda *_: None, model, torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match='layout="tensor=2", so this step does not follow the'):
        tutti.distribute(*given, "tensor=2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tutti.distribute(*given, Plan.read(tmp_path / "plan.json").layout)


def test_an_answer_comes_before_its_file(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes while the plan works."""
    (folder := tmp_path / "plans").mkdir()
    monkeypatch.setattr(
        "tutti.planning.plan_progress.PlanProgress.__call__",
        lambda *_: folder.exists() and folder.rmdir(),
    )
    words = "--devices", "2 x h100", "--layout", "data=2 micro=1 remat=none"
    result = plan(script, *words, "--save", str(folder / "plan.json"))
    assert result.exit_code == 2
    assert "data=2" in result.stdout and "cannot write the plan" in result.stderr


def test_a_plan_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace('raise SystemExit("the step ran")', 'print("ran", step.layout)')
    )
    words = ["--devices", "2 x h100", "--layout", "data=2 zero=3 micro=1 remat=none"]
    made = plan(script, *words, "--save", str(tmp_path / "plan.json"))
    assert made.exit_code == 0, made.output
    command = ["-m", "tutti", "run", "--plan", tmp_path / "plan.json", script]
    ran = forked.run(command, env=dict(os.environ), cwd=tmp_path, timeout=90)
    assert "ran data=2 zero=3" in ran.stdout, ran.stderr
    script.write_text(script.read_text().replace("64", "65"))
    ran = forked.run(command, env=dict(os.environ), cwd=tmp_path, timeout=90)
    assert ran.returncode == 2 and "the plan is for another model" in ran.stderr
    assert f"at   {tmp_path / 'plan.json'}" in ran.stderr
    monkeypatch.setenv("TUTTI_PLAN", str(tmp_path / "plan.json"))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(tutti.PlanError, match="for 2 ranks, and 1 are running"):
        tutti.distribute(lambda *_: None, model, torch.optim.SGD(model.parameters()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tutti.PlanError, match="the plan is for another model"):
        tutti.distribute(lambda *_: None, model, torch.optim.SGD(model.parameters()))


def test_a_plan_and_a_layout_are_refused(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    words = ["run", "--plan", str(path), "--layout", "data=2", str(script)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "one of them" in result.stderr
    result = CliRunner().invoke(app, ["run", "--plan", str(path), str(script)])
    assert "is no plan: it lacks devices" in result.stderr


def test_a_plan_of_this_machine_warns_of_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware_files.write(FOUND, tmp_path)
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(other_work, "busy_processors", lambda _: 1.5)
    asked = ("", None, "", "", None, False)
    with pytest.warns(UserWarning, match="other work keeps 1.5 of .* Plan again"):
        plan_layouts._question("", *asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_layouts._question("64 x h100", *asked)  # nothing is timed
