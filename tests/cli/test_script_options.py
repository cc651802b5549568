"""Options before and behind a script: whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_look import SCRIPT
from tutti.cli.main import app

LAYOUT, DEVICES = ["--layout", "data=2"], ["--devices", "2 x h100"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def tutti(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def arguments(script: str) -> str:
    return Path(f"{script}.txt").read_text().splitlines()[0]


@pytest.mark.parametrize("behind", [[*LAYOUT, *DEVICES], ["--devices=2 x h100", "--layout=data=2"]])
def test_what_simulate_needs_may_stand_behind_the_script(script: str, behind: list[str]) -> None:
    first = tutti("simulate", *LAYOUT, *DEVICES, script, "--lr", "0.1", "--devices", "own")
    assert first.exit_code == 0 and "a step of" in first.stdout, first.output
    assert arguments(script) == "arguments --lr 0.1 --devices own"
    later = tutti("simulate", script, *behind, "--lr", "0.1")
    assert later.stdout == first.stdout and not later.stderr
    assert arguments(script) == "arguments --lr 0.1"


def test_one_of_both_behind_the_script(script: str) -> None:
    made = tutti("simulate", *LAYOUT, script, *DEVICES, "--straggler", "2")
    assert made.exit_code == 0 and "times as long as without" in made.stdout
    assert arguments(script) == "arguments"


def test_no_hint_at_an_option_that_the_script_names(script: str) -> None:
    """In its own text, or in that of a module beside it."""
    path, parser = Path(script), 'OPTIONS = ["--layout", "--lr"]\n'
    path.with_name("own_options.py").write_text(parser)
    for more in ("import own_options\n", parser):
        path.write_text(f"{more}{SCRIPT}")
        made = tutti("explain", script, *LAYOUT, "--graph")
        assert made.exit_code == 0, made.output
        assert arguments(script) == "arguments --layout data=2 --graph"
        assert "--layout stands" not in made.stderr and "--graph stands" in made.stderr


def test_a_hint_at_an_option_that_the_script_takes(script: str) -> None:
    made = tutti("explain", script, *LAYOUT, "--graph", "--lr", "0.1")
    assert made.exit_code == 0
    assert arguments(script) == "arguments --layout data=2 --graph --lr 0.1"
    hints = made.stderr.splitlines()
    assert [line for line in hints if "tutti: --layout stands behind the script" in line]
    assert [line for line in hints if "tutti: --graph stands behind the script" in line]
    assert "--lr" not in made.stderr
    assert "stands behind" not in tutti("explain", *LAYOUT, script, *LAYOUT).stderr
