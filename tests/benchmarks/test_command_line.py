"""The benchmarks' commands: one name for one thing, a line of help for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import command_line
from benchmarks.__main__ import commands
from benchmarks.command_line import OPTIONS, chosen, parser

HERE = Path(command_line.__file__).parent


def test_every_command_takes_its_options_from_the_table() -> None:
    names = [name for name, _ in commands()]
    assert len(names) > 15
    texts = {name: (HERE / f"{name}.py").read_text() for name in names}
    assert [n for n, text in texts.items() if "parser(__doc__" not in re.sub(r"\s", "", text)] == []
    assert [n for n, text in texts.items() if "ArgumentParser(" in text or "typer" in text] == []
    assert [n for n, text in texts.items() if f"python -m benchmarks.{n}" not in text] == []


def test_every_command_has_its_line() -> None:
    assert [name for name, line in commands() if not 20 < len(line) < 120] == []


def test_every_option_of_the_table_is_of_a_command() -> None:
    text = "".join((HERE / f"{name}.py").read_text() for name, _ in commands())
    assert [name for name in OPTIONS if not re.search(rf"\b{name}\b", text)] == []


def test_options_have_the_type_of_the_table() -> None:
    made = parser("One line.\n\nMore.", rounds=7, minutes=None, models=["a", "b"], quick=False)
    assert made.description == "One line."
    assert vars(made.parse_args([])) == {
        **{"rounds": 7, "minutes": None, "models": ["a", "b"], "quick": False}
    }
    given = made.parse_args(["--rounds", "3", "--minutes", "0.5", "--models", "b", "c", "--quick"])
    assert (given.rounds, given.minutes, given.models, given.quick) == (3, 0.5, ["b", "c"], True)
    assert "how often each way takes its turn (7)" in made.format_help()


def test_other_options_are_refused() -> None:
    with pytest.raises(KeyError, match="how_many"):
        parser("", how_many=3)


def test_unknown_names_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser("", models=["a"])
    assert chosen(made, "models", ["a"], {"a": 1, "b": 2}) == [1]
    with pytest.raises(SystemExit):
        chosen(made, "models", ["c"], {"a": 1, "b": 2})
    assert "--models: no c; there are a, b" in capsys.readouterr().err
