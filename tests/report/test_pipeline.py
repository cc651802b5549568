"""What `explain` says of a step in micro-batches and stages."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from subjects import program
from tutti.graph import text
from tutti.layout import Layout
from tutti.pipeline.ready import in_time
from tutti.planner.stages import forecast
from tutti.quantities import format_nbytes, format_seconds
from tutti.report.collective_records import records
from tutti.report.explanation import explain
from tutti.verification.verdict import Subject

PIPE = "pipe=2 micro=4"


def rows(report: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose head begins with a word, the head among them."""
    lines = report.splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith(first_column + " "))
    block = []
    for line in lines[start:]:
        if not line:
            break
        block.append(re.split(r"  +", line))
    return block


def test_sums_over_time_are_no_collectives() -> None:
    assert records(program("gpt", "micro=4")) == []
    assert "no collectives" in explain(program("gpt", "micro=4"))


def test_what_runs_within_a_loop_counts_once_a_micro_batch() -> None:
    plain = [r for r in records(program("gpt", "tensor=2")) if r.region in ("forward", "backward")]
    timed = records(program("gpt", "tensor=2 micro=4"))
    inside = [r for r in timed if r.times == 4]
    assert inside and all(r.times in (1, 4) for r in timed)
    # Each moves a quarter of the batch, four times.
    assert sum(r.nbytes * r.times for r in inside) == sum(
        r.nbytes for r in plain if r.value and r.times == 1 and len(r.shape) > 1
    )
    total = sum(r.nbytes * r.times for r in timed)
    report = explain(program("gpt", "tensor=2 micro=4"))
    count = sum(r.times for r in timed)
    assert f"{count} collectives a step, {format_nbytes(total)} sent by each rank" in report


def test_state_names_its_place_and_each_place_its_bytes() -> None:
    made = program("gpt", PIPE)
    owners = in_time(made).owners
    table = rows(explain(made), "state")
    head = table[0]
    assert head[:7] == ["state", "dtype", "shape", "stored", "computed", "pipe", "per rank"]
    found = {row[0]: row[-2] for row in table[1:-1]}
    assert found == {n: ", ".join(map(str, sorted(at))) for n, at in owners.items()}
    assert re.fullmatch(
        r"in all [\d.]+ kB, [\d.]+ kB per rank of pipeline ranks 0 to 1, of [\d.]+ kB",
        " ".join(table[-1]),
    )
    assert explain(made).startswith(f'layout "{PIPE}": 2 ranks, mesh pipe=2\n')


def test_stages_hold_every_module_once_and_share_the_time() -> None:
    made = in_time(program("gpt", PIPE))
    found = forecast(made)
    whole = [m for s in found.stages for m in s.modules if not m.startswith("part of ")]
    assert len(whole) == len(set(whole))
    assert {m.split(".")[0] for s in found.stages for m in s.modules} >= {"embed", "blocks", "head"}
    slow, fast = sorted((s.seconds for s in found.stages), reverse=True)
    assert fast > 0.6 * slow
    table = rows(explain(program("gpt", PIPE), made=made), "stage")
    assert [row[:2] for row in table] == [["stage", "pipe"], ["0", "0"], ["1", "1"]]
    assert all(re.search(r"\.py:\d+$", row[5]) for row in table[1:])


def test_messages_are_counted_with_their_bytes_and_lines() -> None:
    made = in_time(program("gpt", PIPE))
    found = [m for m in forecast(made).messages if m.edge]
    # One hidden state each way: a quarter of the batch, 16 tokens, 32 wide, float32.
    hidden = 2 * 16 * 32 * 4
    assert {(m.edge, m.kind, m.times) for m in found} == {((0, 1), "F", 4), ((1, 0), "B", 4)}
    assert all(m.nbytes % hidden == 0 and m.num_values == m.nbytes // hidden for m in found)
    assert all(re.search(r"\.py:\d+$", m.source) for m in found)
    total = sum(m.nbytes * m.times for m in forecast(made).messages)
    report = explain(program("gpt", PIPE), made=made)
    assert f"{format_nbytes(total)} a step cross between pipeline ranks" in report


def test_the_schedule_is_drawn_with_its_idle_share() -> None:
    for schedule in ("1f1b", "gpipe"):
        made = in_time(program("gpt", f"{PIPE} schedule={schedule}"))
        timeline = forecast(made).timeline
        assert timeline is not None and 0.1 < timeline.idle_share < 0.4
        report = explain(program("gpt", f"{PIPE} schedule={schedule}"), made=made)
        line = f"schedule {schedule}: 2 stages, 4 micro-batches, predicted"
        assert (
            f"{line} {format_seconds(timeline.seconds)}, {timeline.idle_share:.1%} of it" in report
        )
        assert "Predicted seconds are those of a thread of a server CPU, for comparison" in report
        drawn = [re.findall(r"[FB]\d", x) for x in report.splitlines() if x.startswith("pipe ")]
        expected = [[str(a)[1:] for a in row] for row in made.schedule.rows]
        assert [row for row in drawn if row] == expected


@pytest.mark.parametrize("layout", ["micro=4", PIPE])
def test_the_graph_shows_parts_and_parses_back(layout: str) -> None:
    made = in_time(program("gpt", layout))
    for one in made.programs:
        printed = text.text(one.graph)
        lines = [line for line in printed.splitlines() if not line.startswith("#")]
        assert [str(line) for line in text.parse(printed)] == lines
        assert max(len(x) for x in lines if " = loop(" in x) < 2000
    report = explain(program("gpt", layout), graph=True)
    for pipe_rank, body in enumerate(made.bodies):
        for stage, kind in body.parts:
            assert f"# part {stage}{kind}\n" in report
        assert (f"# pipeline rank {pipe_rank}\n" in report) == (len(made.bodies) > 1)
        assert " ".join(map(str, body.row)) in report


class First(nn.Module):
    """Of many values the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.weight


def wide_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_a_cut_that_costs_more_than_it_saves_is_named() -> None:
    """Many values cross to a stage that has next to nothing to do."""
    model = nn.Sequential(nn.Linear(8, 4096), nn.GELU(), First())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(wide_step, model, optimizer, (torch.randn(64, 8),), steps=1)
    dear = in_time(subject.program(Layout.parse("pipe=2 micro=2")), cut_at=["2"])
    (said,) = forecast(dear).dear_cuts()
    assert re.search(r"the cut before stage 1 \(\S+\.py:\d+\) moves \d+ bytes", said)
    report = explain(subject.program(Layout.parse("pipe=2 micro=2")), made=dear)
    assert f"WARNING: {said}" in report
    assert not list(forecast(in_time(program("gpt", PIPE))).dear_cuts())
