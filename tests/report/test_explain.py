"""What `explain` prints: where state lives, totals, every collective, and where a sharding came from."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import tutti
import zoo
from subjects import program
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.partition.partition import partition
from tutti.planner.memory import predict
from tutti.propagate.plan import plan
from tutti.quantities import format_nbytes
from tutti.report.explanation import explain, records

WHOLE = "7 samples do not divide by data=2: each rank computes all"
SLICES = "does not divide a rank's samples, or chunks of them"
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def total(text: str) -> tuple[float, float]:
    """Bytes per rank, and of the whole."""
    match = re.search(r"^in all ([\d.]+) (\w+) per rank of ([\d.]+) (\w+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1]) * UNITS[match[2]], float(match[3]) * UNITS[match[4]]


@pytest.mark.parametrize(("name", "ways"), [("gpt", 2), ("llama", 8)])
def test_zero_3_keeps_one_nth_of_all_state(name: str, ways: int) -> None:
    mine, whole = total(explain(program(name, f"data={ways} zero=3")))
    assert mine == pytest.approx(whole / ways, rel=0.02)
    replicated, all_of_it = total(explain(program(name, f"data={ways}")))
    assert replicated == all_of_it == whole


def test_zero_1_keeps_parameters_whole_and_slots_in_parts() -> None:
    mine, whole = total(explain(program("gpt", "data=2 zero=1")))
    # Of AdamW's three tensors a parameter, one is whole: 1/3 + 2/3 / 2.
    assert mine == pytest.approx(whole * 2 / 3, rel=0.02)


def test_the_state_table_has_a_line_a_tensor() -> None:
    made = program("gpt", "data=2 tensor=2 zero=3")
    lines = explain(made).splitlines()
    assert lines[0] == 'layout "data=2 tensor=2 zero=3": 4 ranks, mesh data=2 tensor=2'
    rows = {line.split()[0]: line for line in lines if line}
    assert set(rows) >= {s.name for s in made.captured.state}
    (up,) = [x for x in lines if x.startswith("blocks.0.up.weight ")]
    columns = re.split(r"  +", up)
    expected = ["blocks.0.up.weight", "f32", "[128, 32]", "tensor+data, -", "tensor, -", "4.1 kB"]
    assert columns == expected
    (slot,) = [x for x in lines if x.startswith("optim.blocks.0.up.weight.exp_avg ")]
    assert "tensor+data, -" in slot


@pytest.mark.parametrize(
    ("layout", "samples", "expected"),
    [
        ("", 8, ["batch.0", "f32", "[8, 4]", "whole", "-, -"]),
        ("data=2", 8, ["batch.0", "f32", "[8, 4]", "whole", "data, -"]),
        ("data=2 micro=2", 8, ["batch.0", "f32", "[8, 4]", "whole", "data+micro, -"]),
        ("data=2", 7, ["batch.0", "f32", "[7, 4]", "whole", "-, -", WHOLE]),
        (
            "data=2 micro=4",
            6,
            ["batch.0", "f32", "[6, 4]", "whole", "data+micro, -", "micro=4 " + SLICES],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*do(es)? not divide:UserWarning")
def test_the_batch_table_says_which_rank_computes_which_samples(
    layout: str, samples: int, expected: list[str]
) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = capture(step, nn.Linear(4, 4), None, (torch.ones(samples, 4),))
    text = explain(partition(plan(captured, Layout.parse(layout), None)))
    (row,) = [line for line in text.splitlines() if line.startswith("batch.0 ")][:1]
    assert re.split(r"  +", row) == expected


@pytest.mark.parametrize(
    ("name", "layout"), [("gpt", "data=2"), ("gpt", "data=2 zero=3"), ("llama", "tensor=2")]
)
def test_the_table_counts_every_collective(name: str, layout: str) -> None:
    made = program(name, layout)
    text = explain(made)
    found = records(made)
    nbytes = format_nbytes(sum(r.nbytes for r in found))
    assert len(found) == len(made.collectives)
    assert f"{len(found)} collectives a step, {nbytes} sent by each rank" in text
    table = text[text.index("line ") :].splitlines()[1:]
    counts = [int(m[1]) for x in table if (m := re.search(r"  (\d+) +[\d.]+ k?M?B$", x))]
    assert sum(counts) == len(found)


def test_every_collective_has_a_line_a_cause_and_bytes() -> None:
    for name, layout in (("gpt", "data=2 seq=2 tensor=2"), ("resnet", "data=2"), ("t5", "data=2")):
        for record in records(program(name, layout)):
            assert re.search(r"\.py:\d+$", record.source), record
            assert record.cause and record.value and record.axes and record.region
            assert record.nbytes > 0


def test_gradients_are_named_by_their_parameters() -> None:
    made = program("gpt", "data=2")
    names = {s.name for s in made.captured.state if s.kind == "parameter"}
    causes = [r.cause for r in records(made) if r.cause.startswith("gradient")]
    assert {re.search(r"\((.*)\)", c)[1] for c in causes} == names  # type: ignore[index]
    assert len(causes) == len(names)


def test_one_device_has_no_collectives() -> None:
    text = explain(program("gpt", ""))
    assert "no collectives" in text and text.startswith('layout "": 1 ranks')


def test_provenance_of_a_tensor() -> None:
    made = program("gpt", "data=2 tensor=2")
    text = explain(made, tensor="blocks.0.down.weight")
    assert text.splitlines() == [
        "blocks.0.down.weight: 32, 128@tensor  (stored 32, 128@tensor)",
        '  tensor: from blocks.0.down.weight: place "*.down.weight"',
    ]
    bias = explain(made, tensor="batch.0")
    assert "the layout splits the batch" in bias


def test_provenance_follows_the_chain_to_the_seed() -> None:
    made = program("gpt", "data=2 tensor=2")
    chain = explain(made, tensor="blocks.0").splitlines()
    assert any("gelu" in line or "by " in line for line in chain)
    seeds = [x for x in chain if "from " in x]
    assert any('place "*.' in x for x in seeds)
    assert any("the layout splits the batch" in x for x in seeds)
    assert explain(made, tensor="nothing.*") == 'no tensor with a sharding matches "nothing.*"'


def test_the_graph_is_printed_on_demand() -> None:
    made = program("gpt", "data=2")
    assert "= all_reduce(" not in explain(made)
    assert explain(made, graph=True).count("= all_reduce(") == len(made.collectives)


def test_the_predicted_memory_is_shown_with_its_kinds_and_the_measured_beside_it() -> None:
    made = program("gpt", "data=2")
    found = predict(made)
    text = explain(made)
    assert f"predicted peak {format_nbytes(found.peak_nbytes)} per rank: state " in text
    assert f"activations {format_nbytes(found.activation_nbytes)}" in text
    assert re.search(
        rf"^at {re.escape(found.op)} \({found.region}, \w+\.py:\d+\); of it", text, re.M
    )
    assert all(f"\n{h.name} " in text for h in found.largest)
    assert "\npredicted for ranks on this host alone, with buffers in shared memory" in text
    assert "predicted for ranks" not in explain(program("gpt", ""))
    assert "measured" not in text
    assert "; measured 1.23 MB" in explain(made, measured=1_230_000)


def test_a_measured_step_is_a_step_and_is_explained() -> None:
    train_step, model, optimizer, batches = zoo.CASES["sgd"].build()
    step = tutti.distribute(train_step, model, optimizer, "")
    step(*batches[0])
    assert "; measured" not in step.explain()
    loss = step.measure(*batches[0])
    assert step.num_steps == 2 and loss.ndim == 0
    call = format_nbytes(predict(step.program).call_nbytes)
    assert f"of it {call} come and go with a call; measured {call}" in step.explain()
