"""Split in time and into stages it is the same step: models, schedules, awkward programs, layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import fx, nn

import stacks
import zoo
from subjects import program, subject
from tutti.graph.ops.loop import loop
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.verification.verdict import Subject
from zoo_models import UNet
from zoo_steps import image_batch, plain_step

LARGEST = 1e-9
# One layout for each model; every schedule on some of the models.
MODELS = {
    "gpt": "pipe=4 micro=8 remat=0.3 schedule=zb",
    "gpt_tied": "pipe=4 micro=4 schedule=interleaved",
    "llama": "pipe=4 micro=4 schedule=zb",
    "gpt2": "pipe=2 micro=4 schedule=zb",
    "t5": "pipe=4 micro=4 schedule=zbv",
    "vit": "pipe=2 micro=4",
    "mamba": "pipe=2 micro=4 schedule=zb",
    "lstm": "pipe=2 micro=4",
    "mlp_muon": "pipe=2 micro=4",
    "adafactor": "pipe=2 micro=4",
    "two_losses": "pipe=2 micro=4 schedule=zb",
    "autocast": "pipe=2 micro=4",
    "eval": "pipe=2 micro=4",
    "accumulate": "pipe=2 micro=4",
    "checkpoint": "pipe=2 micro=4 schedule=zb",
    "resnet": "pipe=2 data=2",
}
MIXED = (
    "pipe=2 data=2 tensor=2 zero=3 micro=4",
    *("pipe=2 data=2 zero=1 micro=4", "pipe=2 seq=2 micro=4"),
    *("data=2 zero=3 micro=4", "tensor=2 micro=4", "micro=4 remat=full"),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved(3)", "zb", "zbv")


def assert_really_split(layout: Layout, timed: Timed) -> None:
    """Every pipeline rank has a stage, keeps state of its own and goes through every micro-batch."""
    for pipe_rank, one in enumerate(timed.programs):
        assert _micro_batches(one.graph) == set(range(layout.micro))
        assert not one.captured.updated or any(p == {pipe_rank} for p in timed.owners.values())
    stages = set(timed.stages.stage.values())
    assert stages == set(range(timed.schedule.num_stages))


def _micro_batches(graph: fx.Graph) -> set[int]:
    """The micro-batches that the loops of a graph go through."""
    bodies = [n.args[0] for n in graph.nodes if n.target is loop]
    return {do.micro for body in bodies for do in body.row}  # type: ignore[union-attr]


def check(made: Subject, layout: str, written: Program | None = None) -> None:
    """The same step in float64, split as the layout says."""
    written = written or made.program(Layout.parse(layout))
    assert written.fallbacks == []
    split: list[Timed] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tutti.verification.verdict.in_time", kept(split))
        found = made.verdict(written.layout, program=written)
    assert found.ok, str(found)
    assert found.max_error < LARGEST
    assert found.num_tensors >= made.steps * len(written.captured.updated)
    assert_really_split(written.layout, split[0])


def kept(split: list[Timed]) -> Callable[..., Timed]:
    """`in_time`, which puts into `split` what it makes."""

    def keeping(*args: Any, **options: Any) -> Timed:
        split.append(in_time(*args, **options))
        return split[-1]

    return keeping


def check_case(name: str, layout: str) -> None:
    made = program(name, layout)
    check(subject(name, made.layout.precision), layout, made)


@pytest.mark.parametrize(("name", "layout"), MODELS.items())
def test_models_and_steps(name: str, layout: str) -> None:
    check_case(name, layout)


@pytest.mark.parametrize("layout", MIXED)
def test_with_other_axes(layout: str) -> None:
    check_case("gpt", layout)


def test_in_half_precision() -> None:
    check_case("gpt", "pipe=2 micro=4 precision=bf16")


def test_heads_split_in_every_stage() -> None:
    check_case("llama", "pipe=2 data=2 tensor=2 zero=3 micro=2")


@pytest.mark.parametrize(
    ("schedule", "ranks"), [*((s, 4) for s in SCHEDULES), *((s, 2) for s in SCHEDULES[1::2])]
)
def test_every_schedule(schedule: str, ranks: int) -> None:
    """Seven micro-batches, which neither the ranks nor the chunks divide."""
    check(stacks.subject("stack"), f"pipe={ranks} micro=7 schedule={schedule}")


def test_seven_micro_batches_of_a_model() -> None:
    """Each has one row at each of two data ranks."""
    images = partial(image_batch, rows=14)
    step, model, optimizer, batches = zoo.build(UNet, images)
    made = Subject(step, model, optimizer, batches[0])
    check(made, "pipe=4 data=2 zero=3 micro=7 schedule=zb")


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """All forwards of even micro-batches first; a backward in halves on one rank, in one on the other."""
    file = tmp_path / "mine.txt"
    file.write_text(
        "0F0 0F2 0F1 0F3 0I0 0I2 0W2 0W0 0I1 0W1 0I3 0W3   # rank 0\n"
        "1F0 1B0 1F2 1B2 1F1 1F3 1B1 1B3\n"
    )
    check(stacks.subject("thrice"), f"pipe=2 micro=4 schedule={file}")


STAGES = "pipe=4 micro=4 schedule=zb"
MORE = "pipe=2 data=2 zero=3 micro=7 schedule=interleaved"
# Both for what stages share; one of the two for losses that are no plain sums over samples, and for others.
AWKWARD = [
    *product(("thrice", "common"), (STAGES, MORE)),
    *(("summed", STAGES), ("penalty", STAGES), ("decay", MORE)),
    *(("bare", STAGES), ("counting", MORE), ("telling", MORE)),
]


@pytest.mark.parametrize(("name", "layout"), AWKWARD)
def test_awkward_programs(name: str, layout: str) -> None:
    check(stacks.subject(name), layout)


@pytest.mark.parametrize("name", ["normed", "contrastive"])
@pytest.mark.parametrize("layout", ["pipe=2", "pipe=4 data=2"])
def test_what_couples_samples_goes_through_stages_whole(name: str, layout: str) -> None:
    check(stacks.subject(name), layout)


@pytest.mark.parametrize("layout", ["pipe=2 micro=7 schedule=zb", "micro=2"])
def test_gradients_accumulated_by_hand(layout: str) -> None:
    check(stacks.subject("chunks"), layout)


def _two_layers() -> nn.Module:
    """The first layer's weight gradient is worked out at the second stage (see `Known limits`)."""
    return nn.Sequential(nn.Linear(stacks.DIM, 16), nn.Tanh(), nn.Linear(16, stacks.NUM_CLASSES))


@cache
def with_adafactor() -> Subject:
    """Adafactor works with Python numbers of a weight, its gradient and its slots."""
    step, model, optimizer, batches = zoo.build(
        _two_layers, stacks.rows_batch, plain_step, zoo.adafactor
    )
    return Subject(step, model, optimizer, batches[0])


@pytest.mark.parametrize("layout", ["pipe=2", "pipe=2 micro=4", "pipe=2 data=2 zero=1 micro=2"])
def test_numbers_are_read_at_other_places(layout: str) -> None:
    check(with_adafactor(), layout)


def test_a_micro_batch_of_one_row() -> None:
    check(stacks.subject("telling"), f"micro={stacks.ROWS}")


@pytest.mark.parametrize("name", ["thrice", "common"])
def test_what_several_stages_read_is_really_read_by_several(name: str) -> None:
    program = stacks.subject(name).program(Layout.parse("pipe=4 micro=4"))
    timed = in_time(program, cut_at=("layers.1", "layers.2", "layers.3"))
    stages: dict[str, set[int]] = {}
    for node in timed.stages.forward:
        for one in _state_behind(node, timed.stages.stage):
            stages.setdefault(one, set()).add(timed.stages.stage[node])
    shared = {"thrice": ["layers.0.weight"], "common": ["mixing", "scale"]}[name]
    assert all(len(stages[one]) >= 3 for one in shared)
    # What never changes lies everywhere it is read; what is trained at one pipeline rank.
    places = {one: 1 if name == "thrice" else len(stages[one]) for one in shared}
    assert {one: len(timed.owners[one]) for one in shared} == places


def _state_behind(node: fx.Node, inside: Mapping[fx.Node, int]) -> set[str]:
    """The inputs that a node reads, itself or as something worked out before the micro-batches."""
    outside = [x for x in node.all_input_nodes if x not in inside]
    found = {x.meta["name"] for x in outside if "name" in x.meta}
    return found.union(*(_state_behind(x, inside) for x in outside))
