"""What a run records of its steps: the user's losses, programs and why, memory, NaN; and nothing changes."""

from __future__ import annotations

import gc
import json
import math
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.environment import PLAN, PREDICTION, REPORT
from tutti.modes import plain
from tutti.planning.plan_file import Plan, fingerprint
from tutti.recording import step_points
from tutti.recording.first_calls import MEASURED_CALL, NUM_TIMED
from tutti.recording.run_writer import RunWriter, writer
from tutti.recording.step_forecast import beside
from tutti.recording.step_rows import MOST_NAN_EVENTS, StepRows
from tutti.recording.step_watch import MOST_DESCRIBED
from tutti.torch_private.profilers import profiler_is_used
from tutti.version import VERSION

STEPS = 8


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step of Adam."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_a_dict(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
    """The same, with more results."""
    return {"norm": x.norm(), "loss": train(model, optimizer, x), "rows": x}


def silent(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """The same, without a result."""
    train(model, optimizer, x)


def losses(
    layout: str,
    folder: str,
    function: Callable[..., Any] = train,
    batches: list[Tensor] | None = None,
) -> list[Any]:
    """The results of some steps on this rank, with records in `folder` if it is given."""
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setenv(REPORT.name, folder)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = tutti.distribute(function, model, optimizer, layout)
        x = torch.linspace(-1, 1, 128).view(8, 16)
        found = [step(b) for b in batches or [x] * STEPS]
        if (out := writer()) is not None:
            out.flush()
        if folder and (torch.distributed.is_initialized() or not layout):
            text = step.explain() if os.environ.get("RANK", "0") == "0" else ""
            return [x.item() if isinstance(x, Tensor) else x for x in found] + [text]
        return [x.item() if isinstance(x, Tensor) else x for x in found]


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """All lines of a rank."""
    return [json.loads(x) for x in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def of(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """The lines of one kind."""
    return [r for r in records(folder, rank) if r["kind"] == kind]


def points(folder: Path, rank: int = 0) -> list[list[Any]]:
    """All points of a rank."""
    return [p for r in of(folder, "steps", rank) for p in r["points"]]


def test_records_change_no_number_and_have_each_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = losses("", "")
    assert capsys.readouterr().err == ""
    *found, text = losses("", str(tmp_path))
    assert found == alone
    rows = points(tmp_path)
    assert [r[0] for r in rows] == list(range(1, STEPS + 1))
    assert [r[3] for r in rows] == pytest.approx(alone, rel=1e-5)
    assert [r[0] for r in rows if r[2] == "nan"] == [
        MEASURED_CALL
    ]  # under the profiler: no time of a step
    (told,) = of(tmp_path, "step")
    assert (told["function"], told["model"], told["optimizers"]) == (
        "train",
        "Sequential",
        ["Adam"],
    )
    assert told["num_parameters"] == sum(a * b + b for a, b in ((16, 16), (16, 16), (16, 4)))
    (made,) = of(tmp_path, "program")
    memory = made["facts"]["memory"]
    assert max(nbytes for _, nbytes, *_ in memory["course"]) == memory["peak_nbytes"]
    kinds = ("state", "gradient", "activation", "other")
    assert sum(memory[f"{k}_nbytes"] for k in kinds) == memory["peak_nbytes"]
    (measured,) = of(tmp_path, "measured")
    assert measured["nbytes"] == measured["predicted_nbytes"] == memory["call_nbytes"]
    assert measured["held_nbytes"] + measured["nbytes"] == memory["peak_nbytes"]
    timed = sorted(r[2] for r in rows[MEASURED_CALL : MEASURED_CALL + NUM_TIMED])
    assert measured["seconds"] == pytest.approx(timed[NUM_TIMED // 2], rel=1e-4)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and " measured; peak memory " in shown and " predicted" in shown
    assert "of it" in text and "; measured" in text  # as after `Step.measure`


def test_the_prediction_of_a_plan_is_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next step has the same layout, which nobody planned."""
    model = nn.Linear(16, 16)
    numbers: Any = {"num_ranks": 1, "rows": 8, "seconds": 0.25, "peak_nbytes": 1, "layouts": ()}
    plan = Plan("", {}, "1 x h100", model=fingerprint(model), version=VERSION, **numbers)
    plan.write(tmp_path / "plan.json")

    def take_steps(folder: str) -> str:
        monkeypatch.setenv(REPORT.name, str(tmp_path / folder))
        step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(STEPS):
            step(torch.ones(8, 16))
        return capsys.readouterr().err

    monkeypatch.setenv(PLAN.name, str(tmp_path / "plan.json"))
    assert " measured, 250 ms predicted; peak memory " in take_steps("planned")
    assert of(tmp_path / "planned", "measured")[0]["predicted_seconds"] == 0.25
    monkeypatch.delenv(PLAN.name)
    assert " measured; peak memory " in take_steps("written")
    assert of(tmp_path / "written", "measured")[0]["predicted_seconds"] is None
    monkeypatch.setenv(PREDICTION.name, "0")
    assert take_steps("silent") == "" and len(of(tmp_path / "silent", "measured")) == 1


def test_the_line_needs_both_sides() -> None:
    assert (
        beside(0.2, None, None, None, None)
        == beside(None, 0.2, None, 5, 7)
        == beside(0.2, None, 5, None, None)
        == ""
    )
    assert beside(0.2, 0.25, None, 5, 7) == "step 200 ms measured, 250 ms predicted"
    assert beside(0.2, None, 5, 6, 7) == (
        "step 200 ms measured; peak memory 12 B measured, 13 B predicted (7 B of it held between calls)"
    )


@pytest.mark.parametrize(("function", "names"), [(in_a_dict, ["loss", "norm"]), (silent, [])])
def test_results_of_other_forms(
    function: Callable[..., Any], names: list[str], tmp_path: Path
) -> None:
    losses("", str(tmp_path), function)
    assert all(r["names"] == names for r in of(tmp_path, "steps"))
    rows = points(tmp_path)
    assert len(rows) == STEPS and all(len(r) == 3 + len(names) for r in rows)
    if names:
        alone = losses("", "", in_a_dict)
        assert [r[3] for r in rows] == pytest.approx([x["loss"].item() for x in alone], rel=1e-5)


def test_a_new_program_says_why(tmp_path: Path) -> None:
    sizes = [8, 8, 6, 8, 4, 2, 10]
    *found, _ = losses("", str(tmp_path), batches=[torch.ones(n, 16) for n in sizes])
    made = of(tmp_path, "program")
    assert [(r["number"], r["step"]) for r in made] == [(1, 1), (2, 3), (3, 5), (4, 6), (5, 7)]
    assert made[0]["why"] == ""
    assert made[1]["why"] == "batch value 0: f32[6, 16] on cpu instead of f32[8, 16] on cpu"
    assert [bool(r["facts"]) for r in made] == [k < MOST_DESCRIBED for k in range(5)]
    assert [p[3] for p in points(tmp_path)] == pytest.approx(found, rel=1e-5)


def test_a_measured_call_that_makes_a_program_does_not_count(tmp_path: Path) -> None:
    """The memory is that of a later call, and belongs to its program."""
    sizes = [8, 6, 4, 4, 4, 4, 4, 4]
    losses("", str(tmp_path), batches=[torch.ones(n, 16) for n in sizes])
    (measured,) = of(tmp_path, "measured")
    facts = of(tmp_path, "program")[2]["facts"]
    assert measured["nbytes"] == measured["predicted_nbytes"] == facts["memory"]["call_nbytes"]
    assert [p[0] for p in points(tmp_path) if p[2] == "nan"] == [4]


def test_no_capture_takes_place_under_the_profiler_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have hundreds of thousands of events, and PyTorch needs seconds for them."""
    profiled, real = [], plain.capture

    def noted(*args: Any, **options: Any) -> Any:
        profiled.append(profiler_is_used())
        return real(*args, **options)

    monkeypatch.setattr(plain, "capture", noted)
    losses("", str(tmp_path), batches=[torch.ones(n, 16) for n in (8, 6, 4, 4, 4, 4, 4)])
    assert len(of(tmp_path, "measured")) == 1
    assert len(profiled) >= 3 and not any(profiled)


def test_nan_is_an_event(tmp_path: Path) -> None:
    good, bad = torch.ones(8, 16), torch.full((8, 16), math.nan)
    batches = [good, good] + [bad] * (MOST_NAN_EVENTS + 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses("", str(tmp_path), batches=batches)
    found = of(tmp_path, "nan")
    assert [r["step"] for r in found] == list(range(3, 3 + MOST_NAN_EVENTS))
    assert {(r["name"], r["value"]) for r in found} == {("loss", "nan")}
    assert [r[3] for r in points(tmp_path)][2:] == ["nan"] * (MOST_NAN_EVENTS + 9)


def test_facts_that_cannot_be_had_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no facts")

    monkeypatch.setattr("tutti.modes.plain.program_facts", broken)
    alone = losses("", "")
    with pytest.warns(
        UserWarning, match="the report lacks the facts of a program: RuntimeError: no facts"
    ):
        *found, _ = losses("", str(tmp_path))
    assert found == alone and of(tmp_path, "program")[0]["facts"] == {}
    assert "no facts" in of(tmp_path, "problem")[0]["text"]


LAYOUTS = ["data=2 zero=3", "tensor=2", "replica=2 sync=average(every=2)", "pipe=2 micro=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_record_what_explain_says(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """Under each layout: losses of each rank, and on rank 0 the table of `explain` as data."""
    place = ranks.run(losses, layout, "", n=2)
    every = ranks.run(losses, layout, str(tmp_path), n=2)
    assert [found[:STEPS] for found in every] == place
    for rank in range(2):
        assert [p[3] for p in points(tmp_path, rank)] == pytest.approx(place[rank], rel=1e-5)
    text = every[0][STEPS]
    facts = of(tmp_path, "program")[0]["facts"]
    for tensor in facts["tensors"]:
        row = next(x for x in text.splitlines() if x.startswith(f"{tensor['name']}  "))
        assert f"  {tensor['stored']}  " in row and str(tensor["shape"]) in row
    counts = sum(r["count"] for r in facts["collectives"])
    if "pipe" not in layout:
        assert f"{counts} collectives a step" in text or (counts == 0 and "no collectives" in text)
    own = of(tmp_path, "program", 1)[0]["facts"]
    if "pipe" in layout:  # the second pipeline rank tells its own memory
        assert set(own) == {"memory"} and own["memory"]["peak_nbytes"] > 0
        assert len(facts["pipeline"]["rows"]) == 2 and len(facts["pipeline"]["stages"]) == 2
        ops = [
            op.rpartition(" in ")[2] for _, _, op, _ in facts["memory"]["course"] if " in " in op
        ]
        assert ops == ["0F0", "0F1", "0B0", "0B1"]
    else:
        assert own == {}
    course = [nbytes for _, nbytes, *_ in facts["memory"]["course"]]
    assert max(course) == facts["memory"]["peak_nbytes"]


def test_a_step_that_is_given_up_is_freed_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORT.name, str(tmp_path))
    model = nn.Linear(4, 4)
    step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        step(torch.ones(2, 4))
    freed = weakref.ref(step._watch)  # type: ignore[arg-type]
    del step
    gc.collect()
    assert freed() is None
    out = writer()
    assert out is not None
    out.flush()
    assert [p[0] for p in points(tmp_path)] == list(range(1, STEPS + 1))


def test_rows_of_other_names_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if several steps are one point."""
    monkeypatch.setattr(step_points, "FULL", 1)
    rows = StepRows(RunWriter(tmp_path, "rank 0"), 1)
    for k in range(1, 12):
        names = ("loss",) if k < 7 else ("loss", "norm")
        rows.add(k, float(k), 1.0, names, [2.0 * k for _ in names])
    rows.write_all()
    found = [(r["names"], [p[0] for p in r["points"]]) for r in of(tmp_path, "steps")]
    ends = {tuple(names): steps[-1] for names, steps in found}
    assert ends == {("loss",): 6, ("loss", "norm"): 11}
    assert all(len(p) == 3 + len(r["names"]) for r in of(tmp_path, "steps") for p in r["points"])


def test_several_steps_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its number, its name and its line; an evaluation has no line."""
    monkeypatch.setenv(REPORT.name, str(tmp_path))
    both = {"a": nn.Linear(4, 4), "b": nn.Tanh()}
    optimizer = torch.optim.SGD(both["a"].parameters(), lr=0.1)

    def first(models: Any, optimizer: Any, x: Tensor) -> Tensor:
        return train(models["a"], optimizer, x)

    def second(models: Any, optimizer: Any, x: Tensor) -> Tensor:
        return train(models["a"], optimizer, models["b"](x))

    steps = [tutti.distribute(function, both, optimizer) for function in (first, second)]
    evaluation = tutti.distribute(lambda models, x: models["a"](x).mean(), both)
    for _ in range(STEPS):
        for step in steps:
            step(torch.ones(2, 4))
        evaluation(torch.ones(2, 4))
    told = [
        (r["of"], r["function"], r["model"], bool(r["optimizers"])) for r in of(tmp_path, "step")
    ]
    assert told == [
        (1, "first", "Linear, Tanh", True),
        (2, "second", "Linear, Tanh", True),
        (3, "<lambda>", "Linear, Tanh", False),
    ]
    assert {r["line"].rpartition(":")[0] for r in of(tmp_path, "step")} == {__file__}
    lines = capsys.readouterr().err.splitlines()
    assert [x.split(" measured")[0].split(": ")[0] for x in lines][1] == "second" and len(
        lines
    ) == 2
    assert {r["of"] for r in of(tmp_path, "measured")} == {1, 2, 3}


def test_without_a_folder_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT.name, raising=False)
    model = nn.Linear(2, 2)
    step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step._watch is None
