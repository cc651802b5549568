"""The choice of a plan against measured layouts: candidates, finalists, ratios, tables; two tiny layouts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

import forked
from benchmarks import choice_models, chosen_layouts
from benchmarks.choice_models import placed_examples
from benchmarks.choice_page import page
from benchmarks.choice_statistics import (
    Answer,
    Candidate,
    Placed,
    Question,
    choice_table,
    finalists,
    place_table,
    questions_of,
    ratio_of,
    ratio_to_best,
    rotated,
    summary,
)
from benchmarks.chosen_layouts import PLACED_LAYOUTS, cases, place_cases
from tests.benchmarks import tiny_choice

CANDIDATES = (
    Candidate("pipe=2 micro=2", 1.3, 60, 20),
    Candidate("data=2", 1.0, 100, 40),
    Candidate("data=2 zero=3", 1.2, 55, 20),
    Candidate("data=2 remat=full", 1.4, 80, 20),
    Candidate("tensor=2", 3.0, 50, 10),
)


def question(share: float | None, candidates: tuple[Candidate, ...] = CANDIDATES) -> Question:
    return questions_of("gpt", 2, candidates, [share])[0]


def test_the_choice_is_the_fastest_by_prediction_within_the_bound() -> None:
    free, bound = question(None), question(0.6)
    assert (free.name, bound.name) == ("gpt n=2 free", "gpt n=2 60%")
    assert free.chosen.layout == "data=2" and free.bound_nbytes == math.inf
    assert bound.bound_nbytes == 60  # of what `data=2` needs
    assert bound.chosen.layout == "data=2 zero=3"
    assert len(bound.fitting) == 3 and bound.num_layouts == 5


def test_layouts_far_from_the_best_prediction_are_not_measured() -> None:
    assert question(None).measured(1.35) == ["data=2", "data=2 zero=3", "pipe=2 micro=2"]
    assert question(0.6).measured(1.35) == ["data=2 zero=3", "pipe=2 micro=2"]
    assert len(question(None).measured(math.inf)) == 5


def test_a_bound_that_no_layout_keeps_is_raised() -> None:
    assert question(0.1).bound_nbytes == pytest.approx(1.05 * 50)
    assert [c.layout for c in question(0.1).fitting] == ["tensor=2"]


def test_finalists_are_the_fastest_beside_the_chosen_one() -> None:
    times = {"a": [3.0, 3.1], "b": [1.0, 9.0], "c": [2.0, 2.2], "d": [1.0, 1.1], "e": [0.1, 0.1]}
    assert finalists(times, "a", ["a", "b", "c", "d"], 2) == ["a", "d", "c"]
    assert finalists(times, "d", ["a", "d", "unmeasured"], 3) == ["d", "a"]


def test_ratios_are_within_a_round() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    times = {"a": [1.1, 2.2, 1.1], "b": [1.0, 2.0, 1.0], "c": [5.0, 5.0, 5.0]}
    best, ratio = ratio_to_best(times, "a")
    assert best == "b" and ratio == pytest.approx(1.1)
    assert ratio_to_best(times, "b") == ("b", 1.0)
    # Faster in the median, slower in most rounds: not better.
    assert ratio_to_best({"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}, "a") == ("a", 1.0)
    assert ratio_of([2.0, 3.0], [1.0, 1.0]) == 2.5


def test_every_round_begins_with_another_layout() -> None:
    orders = [rotated(["a", "b", "c"], turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) == 6


def test_tables_and_summary() -> None:
    answers = [
        Answer(question(None), 3, 1.0, "data=2", 1.0, 1.0, 90),
        Answer(question(0.6), 2, 1.2, "pipe=2 micro=2", 1.0, 1.2, 61),
    ]
    rows = choice_table(answers).split("\n")
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert "5, 5, 3 | `data=2` | 1000.0 | 1000.0 | the same" in rows[2]
    assert "60 B | 5, 3, 2 | `data=2 zero=3`" in rows[3] and "| 1.200 |" in rows[3]
    said = summary(answers)
    assert said.startswith("1 of 2 choices are within 3%")
    assert "worst 1.200 (gpt n=2 60%)" in said and "Above their bound: gpt n=2 60% by 1.7%." in said
    places = [Placed("llama", "tensor=2", 0.1, 0.102, 1.02)]
    assert place_table(places).endswith("| llama | `tensor=2` | 100.0 | 102.0 | 1.020 |")
    made = page(answers, places, 1.3, 9.0, 20.0)
    assert made.startswith("# Chosen layouts\n") and "other work had a part" in made
    assert all(row in made for row in rows)
    assert "other work" not in page(answers, places, 1.3, 0.1, 20.0)
    assert max(map(len, (x for x in made.split("\n") if not x.startswith("|")))) <= 250


def test_cases_are_chosen_by_parts_of_their_names() -> None:
    every = cases([], quick=False)
    assert sum(map(len, every.values())) >= 16
    assert {n for _, n in every} == {1, 2, 4}
    assert cases(["gpt n=2"], quick=False) == {("gpt", 2): [None, 0.6]}
    assert all(shares == [0.6] for shares in cases(["60%"], quick=False).values())
    assert list(cases([], quick=True)) == [("tiny", 2)]
    assert cases(["place"], quick=False) == {} and place_cases(["gpt n=2"], quick=False) == []
    assert place_cases(["place gpt"], quick=False) == [("gpt", x) for x in PLACED_LAYOUTS]
    assert {name for name, _ in place_cases([], quick=True)} == set(placed_examples())


def test_models_and_examples_have_steps() -> None:
    assert {"gpt", "llama"} <= set(choice_models.placed_examples())
    for name in choice_models.placed_examples():
        made = choice_models.example(name)
        assert made.place and made.step(made.model, made.optimizer, *made.batch).isfinite()
    one = choice_models.trained("vit")
    assert one.step(one.model, one.optimizer, *one.batch).isfinite()


def test_two_tiny_layouts_from_plan_to_ratio() -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    script = Path(__file__).parent / "tiny_choice.py"
    done = forked.run([script], env=env, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chosen"] == "data=2" and found["num_measured"] == 2
    assert found["best"] in tiny_choice.LAYOUTS and found["ratio"] >= 1
    assert found["best_seconds"] > 0 and found["seconds"] > 0
    assert found["peak_nbytes"] > 500  # what is held between calls, and the measured call


def test_a_plan_of_a_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        from tests.planning.test_hardware_files import FOUND
        from tutti.planning import hardware_files

        folder = tmp_path_factory.mktemp("hardware")
        hardware_files.write(FOUND, folder)
        patch.setenv("TUTTI_HARDWARE", str(folder))
        found = chosen_layouts.planned("tiny", 1)
    assert {c.layout for c in found} == {"", "micro=2", "remat=full", "micro=2 remat=full"}
    assert all(c.peak_nbytes > c.call_nbytes > 0 and c.seconds > 0 for c in found)
