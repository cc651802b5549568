"""`tutti simulate`: what it prints, draws and refuses."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app

PAGE = Path(__file__).parents[2] / "docs/concepts/pipeline.md"


def test_what_the_page_shows_is_printed() -> None:
    result = CliRunner().invoke(
        app, ["simulate", *["--schedule", "zb", "--ranks", "4", "--micro", "4"]]
    )
    assert result.exit_code == 0
    shown = "\n".join(f"    {line}".rstrip() for line in result.stdout.rstrip().split("\n"))
    assert f"--schedule zb --ranks 4 --micro 4\n{shown}\n" in PAGE.read_text()


def test_costs_and_transfers_count() -> None:
    words = "--schedule 1f1b --ranks 2 --micro 1 --costs F=1,I=2,W=4 --transfer 0.5"
    result = CliRunner().invoke(app, ["simulate", *words.split()])
    assert "1f1b: 2 ranks, 2 stages, 1 micro-batches; the step takes 15, 53.3%" in result.stdout


def test_chunks_count() -> None:
    words = "--schedule interleaved --ranks 2 --micro 4 --chunks 2"
    result = CliRunner().invoke(app, ["simulate", *words.split()])
    assert "2 ranks, 4 stages, 4 micro-batches; the step takes 27" in result.stdout
    assert [line.split() for line in result.stdout.split("\n")[-3:-1]] == [
        ["0", "0", "2", "3", "11.1%", "5"],
        ["1", "1", "3", "3", "11.1%", "3"],
    ]


def test_chunks_may_stand_in_the_name_as_in_a_layout() -> None:
    words = ["--schedule", "interleaved(2)", "--ranks", "2", "--micro", "4"]
    result = CliRunner().invoke(app, ["simulate", *words])
    assert "interleaved(2): 2 ranks, 4 stages, 4 micro-batches; the step takes 27" in result.stdout
    other = CliRunner().invoke(app, ["simulate", *words, "--chunks", "3"])
    assert other.exit_code == 2 and "interleaved(2) has 2 stages per rank" in other.stderr


def test_a_file_and_an_image(tmp_path: Path) -> None:
    path, image = tmp_path / "mine.txt", tmp_path / "step.svg"
    path.write_text("0F0 0F1     0B0     0B1 # rank 0\n    1F0 1B0 1F1 1B1\n")
    result = CliRunner().invoke(app, ["simulate", "--schedule", str(path), "--svg", str(image)])
    assert result.exit_code == 0 and "2 ranks, 2 stages, 2 micro-batches" in result.stdout
    assert ElementTree.parse(image).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--schedule zb --ranks 2", "zb needs --ranks and --micro"),
        ("--schedule zz --ranks 2 --micro 2", 'unknown schedule "zz"'),
        ("--schedule gone.txt", "there is no schedule file gone.txt"),
        ("--schedule FILE --micro 2", "do not go with the file"),
        ("--schedule FILE", "line 2, column 5"),
        ("--schedule zb --ranks 2 --micro 2 --costs F=1,X=2", 'cannot read "X=2" in --costs'),
        ("--schedule zb --ranks 2 --micro 2 --costs F=fast", 'cannot read "F=fast"'),
        ("--schedule zb --ranks 2 --micro 2 --costs F=1", "costs lack the seconds of I"),
        ("--schedule zb --ranks 2 --micro 2 --transfer -1", "a transfer cannot take -1.0"),
    ],
)
def test_a_mistake_is_told_and_ends_with_2(words: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text("0F0 0B0\n1F0 1f0\n")
    given = [str(path) if word == "FILE" else word for word in words.split()]
    result = CliRunner().invoke(app, ["simulate", *given])
    assert result.exit_code == 2
    assert result.stderr.startswith("ScheduleError: ") and what in result.stderr


@pytest.mark.parametrize("option", ["--ranks", "--micro", "--chunks"])
def test_numbers_below_one_are_refused(option: str) -> None:
    words = ["--schedule", "1f1b", "--ranks", "2", "--micro", "2", option, "0"]
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 2 and "Invalid value" in result.stderr


def test_an_image_that_cannot_be_written(tmp_path: Path) -> None:
    words = [
        "--schedule",
        "zb",
        "--ranks",
        "2",
        "--micro",
        "2",
        "--svg",
        str(tmp_path / "no/x.svg"),
    ]
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 2 and "No such file or directory" in result.stderr
