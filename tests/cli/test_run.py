"""The command line of `tutti run`: what is refused before anything starts, what is passed on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forked
from tutti.cli.main import app
from tutti.environment import PROFILE
from tutti.launch import launch

PROFILED = """\
import torch, tutti

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model = torch.nn.Linear(8, 8)
step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    step(torch.ones(4, 8))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def launch_nothing(*args: Any, **_: Any) -> int:
        calls.append(args)
        return 7

    monkeypatch.setattr(launch, "launch", launch_nothing)
    return calls


def test_a_layout_of_another_size_is_refused(script: str, launched: list[Any]) -> None:
    result = CliRunner().invoke(app, ["run", "-n", "3", "--layout", "data=2 tensor=2", script])
    assert result.exit_code == 2
    assert 'LayoutError: layout "data=2 tensor=2" needs 4 ranks, -n gives 3' in result.stderr
    assert "-n 4" in result.stderr
    assert not launched


def test_script_arguments_pass_untouched(script: str, launched: list[Any]) -> None:
    words = ["--steps", "3", "-n", "9", "--", "$x", "--layout=data=8"]
    result = CliRunner().invoke(app, ["run", "-n", "4", "--layout", "data=4", script, *words])
    assert result.exit_code == 7
    assert launched == [(4, script, words, "data=4")]


def test_the_layout_gives_the_number_of_ranks(script: str, launched: list[Any]) -> None:
    CliRunner().invoke(app, ["run", "--layout", "data=2 tensor=2", script])
    CliRunner().invoke(app, ["run", script])
    assert [call[0] for call in launched] == [4, 1]


@pytest.mark.parametrize("options", [[], ["--layout", "replica=2 server=1 sync=async"]])
@pytest.mark.parametrize("name", ["TUTTI_TIMEOUT", "TUTTI_LEASE", "TUTTI_LINGER"])
def test_an_odd_number_of_seconds_is_refused_by_name_before_anything_starts(
    name: str,
    options: list[str],
    script: str,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(name, "nan")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["run", *options, script])
    assert result.exit_code == 2
    assert f'LayoutError: {name}="nan" is not a number of seconds' in result.stderr
    assert f"fix  {name}=" in result.stderr
    assert not launched and not list(tmp_path.glob("tutti-*"))


def test_a_profile_makes_its_folder_and_tells_the_ranks(
    script: str, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE.name, "")  # put back afterwards
    folder = tmp_path / "traces"
    CliRunner().invoke(app, ["run", "--profile", str(folder), script])
    assert launched and folder.is_dir() and PROFILE.read() == str(folder)
    launched.clear()
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["run", "--profile", str(tmp_path / "file" / "x"), script])
    assert result.exit_code == 2 and "no trace can be written" in result.stderr and not launched


def test_a_log_folder_that_cannot_be_made_is_refused(
    script: str, launched: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["run", "--log-dir", str(tmp_path / "file" / "x"), script])
    assert result.exit_code == 2 and "no log can be written to" in result.stderr and not launched


def test_a_run_that_is_refused_keeps_earlier_traces(script: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").touch()
    words = ["--profile", str(tmp_path), "-n", "3", "--layout", "data=2", script]
    assert CliRunner().invoke(app, ["run", *words]).exit_code == 2
    assert (tmp_path / "rank-0.json").exists()


def test_a_run_too_short_for_a_profile_ends_well_and_says_so(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE.name, "")  # put back afterwards
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 0)
    result = CliRunner().invoke(app, ["run", "--profile", str(tmp_path / "traces"), script])
    assert result.exit_code == 0
    assert "no trace in" in result.stderr and "at least three steps" in result.stderr


def test_a_profiled_run_ends_with_its_slowest_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROFILED)
    words = ["-m", "tutti", "run", "--profile", str(tmp_path / "traces"), str(path)]
    done = forked.run(words, env=dict(os.environ), cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "profile: 3 calls of" in done.stderr and "on each of 1 rank, in" in done.stderr
    assert "train.py:4 backward" in done.stderr
