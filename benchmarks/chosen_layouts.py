"""The planner's choice against the fastest layout: every layout of small models, measured side by side.

    python -m benchmarks.chosen_layouts                       # --write makes the page
    python -m benchmarks.chosen_layouts --cases "gpt n=2" "moe n=4 60%" place
    python -m benchmarks.chosen_layouts --quick

The machine is calibrated, and each model planned for 1, 2 and 4 ranks of it, as `tutti plan` does; a bound of
memory turns some layouts away. The chosen layout and every other that fits and is predicted within `--factor`
of it take turns on real ranks; those that are nearly the fastest then take more turns, which alone count.
Last, the steps of `examples/` with a `place` run under it, and under the placement that tutti finds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tutti
from benchmarks.alternating import Alternating, slowest
from benchmarks.choice_models import MODELS, TINY, Trained, example, placed_examples, trained
from benchmarks.choice_page import page
from benchmarks.choice_statistics import (
    Answer,
    Candidate,
    Placed,
    Question,
    case_name,
    choice_table,
    finalists,
    place_table,
    questions_of,
    ratio_of,
    ratio_to_best,
    summary,
)
from benchmarks.command_line import parser
from tutti.calibration import measurement
from tutti.environment import HARDWARE
from tutti.job import Job
from tutti.launch.launch import launch
from tutti.layout import Layout
from tutti.planning import hardware_files
from tutti.planning.layout_plan import answer
from tutti.planning.this_machine import question_here

PAGE = Path(__file__).with_name("chosen_layouts.md")
RANKS, SHARES = (1, 2, 4), (None, 0.6)
# Models whose layouts of 4 ranks are measured: there are twice as many as of 2 ranks, and each takes longer.
_ON_FOUR = ("gpt", "llama", "resnet", "moe")
PLACED_LAYOUTS = ("tensor=2", "data=2 tensor=2")
_FIRST_ROUNDS, _MOST_FINALISTS = 2, 3


@dataclass(frozen=True)
class Pace:
    """How long to measure: final rounds, seconds of a turn, layouts within `factor` of the best one."""

    rounds: int
    turn_seconds: float
    factor: float


def planned(model: str, num_ranks: int) -> list[Candidate]:
    """Every layout of a model for so many ranks of this machine, predicted."""
    one = trained(model)
    job = Job.of(one.step, one.model, one.optimizer, Layout())
    question = question_here(num_ranks=num_ranks, capacity=float("inf"))
    rows = answer(job, one.batch, question).ranking.rows
    found = []
    for row in rows:
        memory = row.estimate.memory
        call = memory.call_nbytes if memory is not None else 0
        found.append(Candidate(row.layout, row.estimate.seconds, row.estimate.peak_nbytes, call))
    return found


def answered(questions: Sequence[Question], pace: Pace) -> list[Answer]:
    """Measure the layouts of questions about one model on one number of ranks."""
    model, num_ranks = questions[0].model, questions[0].num_ranks
    measured = {q.name: q.measured(pace.factor) for q in questions}
    layouts = list(dict.fromkeys(x for names in measured.values() for x in names))
    found = _on_ranks(num_ranks, {"model": model, "layouts": layouts, "fitting": measured}, pace)
    return [_answer(q, measured[q.name], found) for q in questions]


def _answer(question: Question, measured: Sequence[str], found: dict[str, Any]) -> Answer:
    chosen, times = question.chosen, found["final"]
    own = {x: times[x] for x in finalists(found["first"], chosen.layout, measured, _MOST_FINALISTS)}
    best, ratio = ratio_to_best(own, chosen.layout)
    held = chosen.peak_nbytes - chosen.call_nbytes
    return Answer(
        question=question,
        num_measured=len(measured),
        seconds=statistics.median(own[chosen.layout]),
        best=best,
        best_seconds=statistics.median(own[best]),
        ratio=ratio,
        peak_nbytes=held + found["call_nbytes"][chosen.layout],
    )


def placed(name: str, layout: str, pace: Pace) -> Placed:
    """An example under its own `place`, and without one."""
    found = _on_ranks(Layout.parse(layout).num_ranks, {"example": name, "layouts": [layout]}, pace)
    hand, own = found["hand"], found["found"]
    medians = statistics.median(hand), statistics.median(own)
    return Placed(name, layout, *medians, ratio_of(own, hand))


def _on_ranks(num_ranks: int, task: dict[str, Any], pace: Pace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "task.json", Path(folder) / "found.json"
        given.write_text(json.dumps(task | vars(pace)))
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        if code := launch(num_ranks, __file__, [str(given), str(made)], ""):
            sys.exit(f"the ranks ended with {code}")
        return json.loads(made.read_text())


def on_rank(task: dict[str, Any]) -> dict[str, Any]:
    """Measure a task on this rank."""
    if "example" in task:
        return _example_on_rank(task)
    steps = {x: _step(trained(task["model"]), x) for x in task["layouts"]}
    calls = Alternating({x: call for x, (_, call) in steps.items()}, task["turn_seconds"])
    first = calls.rounds(list(steps), _FIRST_ROUNDS)
    last: dict[str, None] = {}
    for names in task["fitting"].values():
        last |= dict.fromkeys(finalists(first, names[0], names, _MOST_FINALISTS))
    final = calls.rounds(list(last), task["rounds"])
    nbytes = {names[0]: 0.0 for names in task["fitting"].values()}
    for layout in nbytes:
        step, _ = steps[layout]
        step.measure(*trained(task["model"]).batch)
        found: Any = step._last
        nbytes[layout] = slowest(found.measured or 0)
    return {"first": first, "final": final, "call_nbytes": nbytes}


def _example_on_rank(task: dict[str, Any]) -> dict[str, Any]:
    one, (layout,) = task["example"], task["layouts"]
    places = {"hand": example(one).place, "found": None}
    calls = {name: _step(example(one), layout, place)[1] for name, place in places.items()}
    made = Alternating(calls, task["turn_seconds"])
    return made.rounds(list(calls), 2 * task["rounds"])


def _step(one: Trained, layout: str, place: Any = None) -> tuple[tutti.Step, Any]:
    step = tutti.distribute(one.step, one.model, one.optimizer, layout, place=place, seed=0)
    return step, partial(step, *one.batch)


def cases(words: Sequence[str], quick: bool) -> dict[tuple[str, int], list[float | None]]:
    """The bounds to try by model and number of ranks; `words` are parts of names of cases."""
    models, ranks = (TINY, (2,)) if quick else (MODELS, RANKS)
    found: dict[tuple[str, int], list[float | None]] = {}
    for model in models:
        for num in (n for n in ranks if n < 4 or model in _ON_FOUR):
            for share in SHARES:
                name = case_name(model, num, share)
                if not words or any(word in name for word in words):
                    found.setdefault((model, num), []).append(share)
    return found


def place_cases(words: Sequence[str], quick: bool) -> list[tuple[str, str]]:
    """The examples and layouts of the second part: cases such as `place gpt tensor=2`."""
    layouts = PLACED_LAYOUTS[:1] if quick else PLACED_LAYOUTS
    pairs = [(name, layout) for name in placed_examples() for layout in layouts]
    return [
        (name, layout)
        for name, layout in pairs
        if not words or any(word in f"place {name} {layout}" for word in words)
    ]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def calibrated(folder: str, quick: bool) -> None:
    """Measure this machine into a folder, which plans then read."""
    found = measurement.measured(seconds=0.2 if quick else measurement.SECONDS)
    hardware_files.write(found, Path(folder))
    os.environ[HARDWARE.name] = folder


def main() -> None:
    """Print both tables and a summary of each."""
    if len(sys.argv) == 3 and sys.argv[1].endswith("task.json"):
        found = on_rank(json.loads(Path(sys.argv[1]).read_text()))
        if int(os.environ.get("RANK", "0")) == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))
        return
    defaults = {"cases": [], "rounds": 9, "turn_seconds": 0.3, "factor": 1.3, "quick": False}
    options = parser(__doc__, **defaults, write=False, out=None).parse_args()
    pace = Pace(options.rounds, options.turn_seconds, options.factor)
    if options.quick:
        pace = Pace(2, 0.02, options.factor)
    os.environ["OMP_NUM_THREADS"] = "1"  # of each rank, and of plans for them
    load, begun = os.getloadavg()[0], time.time()
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        _say("calibrates")
        calibrated(folder, options.quick)
        for (model, num), shares in cases(options.cases, options.quick).items():
            _say(f"plans {model} for {num} ranks")
            questions = questions_of(model, num, planned(model, num), shares)
            _say(f"measures {sum(len(q.measured(pace.factor)) for q in questions)} layouts")
            answers += answered(questions, pace)
            _say(f"{', '.join(f'{a.ratio:.3f}' for a in answers[-len(shares) :])} of the best")
    places: list[Placed] = []
    for name, layout in place_cases(options.cases, options.quick):
        _say(f"measures {name} under {layout}, by hand and found")
        places.append(placed(name, layout, pace))
    print(choice_table(answers), summary(answers), place_table(places), sep="\n\n")
    if options.out:
        Path(options.out).write_text(json.dumps([_record(a) for a in answers], indent=1))
    if options.write:
        PAGE.write_text(page(answers, places, pace.factor, load, (time.time() - begun) / 60))


def _record(one: Answer) -> dict[str, Any]:
    question = one.question
    words = {"model": question.model, "num_ranks": question.num_ranks, "share": question.share}
    return (
        words
        | {"chosen": question.chosen.layout}
        | {name: value for name, value in vars(one).items() if name != "question"}
    )


if __name__ == "__main__":
    main()
