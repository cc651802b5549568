"""Tables, targets, picture and files from a result whose figures are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Entry
from benchmarks.machine import describe, slug
from benchmarks.report import draw, markdown, race_table, tables, write
from benchmarks.result import Race, Result
from benchmarks.targets import Verdict, verdicts


def entry(way: str, units: int, seconds: list[float], nbytes: int = 0, error: str = "") -> Entry:
    ranks = 1 if way in ("one", "jax") else 2
    return Entry(way, ranks, units, seconds, peak_nbytes=nbytes, error=error)


@pytest.fixture
def result() -> Result:
    """On the second round the machine was twice as slow for everybody."""
    ours = entry("tutti data=2", 2048, [0.2, 0.4, 0.2], 50_000_000)
    ours.shares = {"hollow": 0.01, "between": 0.02, "outside": 0.04}
    entries = [
        entry("one", 1024, [0.25, 0.5, 0.25], 40_000_000),
        entry("one x 2", 1024, [0.4, 0.8, 0.4], 40_000_000),
        entry("ddp", 2048, [0.3, 0.5, 0.4], 80_000_000),
        ours,
        entry("fsdp2", 2048, [0.8, 1.6, 0.8], 100_000_000),
        entry("tutti data=2 zero=3", 2048, [0.3, 0.6, 0.3], 120_000_000),
        entry("tutti tensor=2", 1024, [0.1, 0.2, 0.1], 30_000_000),
        entry("jax", 2048, [], error="Traceback ...\njax is not installed"),
    ]
    race = Race("gpt-29.5M", "tokens", 29_453_312, {"depth": 4}, entries)
    move = {"name": "all_reduce", "nbytes": 4_000_000, "seconds": {"gloo": 0.004, "tutti": 0.001}}
    moves = [move, *(in_a_program(n, b, s) for n, b, s in IN_A_PROGRAM)]
    machine = {"processor": "Some CPU @ 2.00GHz", "cores": "2", "load before": "0.1"}
    return Result("2000-01-02", machine, {"num_rounds": 3}, [race], moves)


def in_a_program(name: str, nbytes: int, seconds: float) -> dict[str, Any]:
    took = {"gloo": 1.0, "tutti": 0.5, "in a program": seconds}
    return {"name": name, "nbytes": nbytes, "seconds": took}


# Of a second of Gloo's.
IN_A_PROGRAM = [
    ("all_reduce", 4_000_000, 0.2), ("all_reduce", 100_000_000, 0.2), ("all_gather", 100_000_000, 0.05),
]  # fmt: skip


def judged(result: Result) -> list[Verdict]:
    return [v._replace(measured=round(v.measured, 3)) for v in verdicts(result)]


def row(result: Result, way: str) -> list[str]:
    return next(r for r in race_table(result.races[0]).rows if r[0] == way)


def test_a_ratio_is_the_median_over_the_rounds(result: Result) -> None:
    race = result.races[0]
    assert race.time_ratio("tutti data=2", "ddp") == pytest.approx(0.2 / 0.3)
    assert race.time_ratio("tutti data=2", "one") == pytest.approx(0.8)
    assert race.memory_ratio("tutti data=2 zero=3", "fsdp2") == pytest.approx(1.2)
    assert race.time_ratio("tutti data=2", "jax") is None
    assert race.time_ratio("tutti data=2", "unknown") is None


def test_a_row(result: Result) -> None:
    # 200 ms, quartiles of (200, 200, 400), 2048 tokens in 0.2 s; dtensor was not run, jax failed
    assert row(result, "tutti data=2") == [
        "tutti data=2", "200", "200 - 300", "10,240", "50", "0.80", "0.50", "0.67", "0.25", "", "",
    ]  # fmt: skip


def test_ratios_of_another_batch_are_left_out_but_for_plain_ones(result: Result) -> None:
    assert row(result, "tutti tensor=2")[5:] == ["0.40", "0.25", "", "", "", ""]


def test_a_way_that_failed_says_why(result: Result) -> None:
    assert row(result, "jax")[:3] == ["jax", "jax is not installed", ""]


def test_targets_are_judged_where_there_are_figures(result: Result) -> None:
    found = {v.what: v[2:] for v in judged(result) if v.subject == "gpt-29.5M"}
    assert found == {
        "time of tutti data=2 / ddp": (0.667, 0.80),
        "time of tutti data=2 zero=3 / fsdp2": (0.375, 0.45),
        "memory of tutti data=2 zero=3 / fsdp2": (1.2, 1.0),
        "Python in tutti data=2": (0.04, 0.03),
    }
    assert [v.is_met for v in judged(result)][:4] == [True, True, False, False]


def test_collectives_are_judged_as_a_program_plays_them(result: Result) -> None:
    found = [v for v in judged(result) if v.subject != "gpt-29.5M"]
    assert [(v.subject, *v[2:], v.is_met) for v in found] == [
        ("all_reduce, 4 MB", 0.2, 0.1, False),
        ("all_reduce, 100 MB", 0.2, 0.25, True),
        ("all_gather, 100 MB", 0.05, 0.1, True),
    ]


def test_the_page_has_every_table(result: Result) -> None:
    text = markdown(result, "x.png")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# 2000-01-02",
        "## gpt-29.5M: 29,453,312 parameters",
        "## Python, share of a step",
        "## Collectives between two ranks",
        "## Targets",
    ]
    assert "| all_reduce, 4 MB | 4.000 | 1.000 | 0.25 |" in text
    for table in tables(result):
        assert {len(r) for r in table.rows} == {len(table.headers)}, table.title


def test_a_written_result_is_read_back(result: Result, tmp_path: Path) -> None:
    page = write(result, tmp_path / "new", "name")
    assert page.read_text() == markdown(result, "name.png")
    assert Result.load(page.with_suffix(".json")) == result
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_where_nothing_ran(tmp_path: Path) -> None:
    failed = Race("m", "tokens", 1, {}, [entry("one", 1, [], error="no")])
    draw(Result("2000-01-02", {}, {}, [failed]), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_machine() -> None:
    intel = {"processor": "Intel(R) Xeon(R) CPU E5-2690 v3 @ 2.60GHz", "cores": "2"}
    assert slug(intel) == "intel-xeon-e5-2690-v3-2-cores"
    assert {"processor", "cores", "torch", "commit"} <= describe().keys()
