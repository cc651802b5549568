"""The command line of `tutti run`: what is refused before anything starts, what is passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.launch import launch


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
