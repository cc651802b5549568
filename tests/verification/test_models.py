"""The matrix: every model, optimizer and step of the zoo is the same step under every layout."""

from __future__ import annotations

import time

import pytest

import tutti
import zoo
from in_turn import in_turn
from subjects import program, subject, verdict
from tutti.layout import ZERO_AXES, Layout
from tutti.partition.partition import Program
from wrong_programs import SHORT

MODELS = (
    *("gpt", "gpt_tied", "llama", "gpt2", "bert", "vit", "t5", "qwen3", "mamba"),
    *("transformer", "lstm", "resnet", "mlp_muon"),
)
WIDE = (*zoo.TRANSFORMERS, "mamba")
# The models meet these in turn: two and four ranks with slots and weights whole and in parts.
DATA = tuple(
    (layout,)
    for layout in ("data=4 zero=3", "data=4 zero=1", "data=2 zero=3", "data=2 zero=1", "data=4")
)
# The level in between, and zero=3 for models that meet it neither above nor in MIXED.
SECOND = (
    *(("gpt", "data=2 zero=2"), ("mlp_muon", "data=2 zero=2"), ("gpt_tied", "data=2")),
    *(("bert", "data=2 zero=3"), ("resnet", "data=4 zero=3"), ("mamba", "data=4 zero=3")),
)
# Both axes in one layout, and then tensor with zero for every other model.
MIXED = (
    ("data=2 seq=2 tensor=2",),
    ("data=2 seq=2 tensor=2", "data=2 tensor=2 zero=3"),
)
ALONE = (
    *(("gpt_tied", "seq=2"), ("gpt", "tensor=2"), ("llama", "data=2 tensor=4")),
    *(("gpt_tied", "seq=2 zero=3"), ("llama", "data=2 seq=2 zero=2"), ("bert", "seq=4 zero=1")),
)
VARIANTS = ("data=2", "data=2 zero=1", "data=2 zero=3", "data=2 tensor=2")
# Adafactor, which reads whole tensors, meets all of them; the others work entry by entry, and meet two.
OF_OPTIMIZERS = (
    *in_turn(
        (name for name in zoo.OPTIMIZERS if name != "adafactor"),
        (("data=2 zero=3", "data=2 tensor=2"), ("data=2", "data=2 zero=1")),
    ),
    *(("adafactor", layout) for layout in VARIANTS),
)
# A step is not split in another way for what it does: its ops are.
OF_STEPS = tuple((layout,) for layout in VARIANTS)
LARGEST = 1e-9
# An image model has no sequence in its batch: nothing for the axis seq to split.
NO_SEQUENCE = frozenset({"vit"})


def split_over(made: Program, axis: str) -> list[str]:
    """The parameters and slots that are stored in parts over `axis`."""
    return [name for name, sharding in made.storage.items() if axis in sharding.axes]


def collectives_over(made: Program, axis: str) -> list[str]:
    """The kinds of the collectives that run over `axis`."""
    return [n.target.__name__ for n in made.collectives if axis in n.args[1]]


def assert_really_split(name: str, made: Program) -> None:
    """Each axis of the layout has something to do: a program of replicas would pass every comparison."""
    layout = made.layout
    place = zoo.CASES[name].place
    if "data" in made.mesh:
        assert collectives_over(made, "data")
    parameters = {s.name for s in made.captured.state if s.kind == "parameter"}
    for axis in ZERO_AXES:
        over, is_there = set(split_over(made, axis)), axis in made.mesh
        if layout.zero and is_there:
            assert any(n.startswith("optim.") for n in over)
        assert (layout.zero == 3 and is_there) == bool(parameters & over)
    if "tensor" in made.mesh and place:
        assert parameters & set(split_over(made, "tensor"))
        assert "all_reduce" in collectives_over(made, "tensor")
    if "seq" in made.mesh and name not in NO_SEQUENCE:
        assert {"all_gather", "reduce_scatter"} & set(collectives_over(made, "seq"))


def check(name: str, layout: str) -> None:
    made = program(name, layout)
    assert made.fallbacks == []
    found = verdict(name, layout)
    assert found.ok, str(found)
    assert found.max_error < LARGEST
    assert found.num_tensors >= subject(name).steps * len(made.captured.updated)


@pytest.mark.parametrize(("name", "layout"), [*in_turn(MODELS, DATA), *SECOND])
def test_data_parallel_and_zero(name: str, layout: str) -> None:
    check(name, layout)
    assert_really_split(name, program(name, layout))


@pytest.mark.parametrize(("name", "layout"), [*in_turn(WIDE, MIXED), *ALONE])
def test_tensor_and_sequence_parallel(name: str, layout: str) -> None:
    check(name, layout)
    assert_really_split(name, program(name, layout))


@pytest.mark.parametrize(("name", "layout"), OF_OPTIMIZERS)
def test_optimizers(name: str, layout: str) -> None:
    check(name, layout)
    assert_really_split(name, program(name, layout))


@pytest.mark.parametrize(("name", "layout"), in_turn(zoo.STEPS, OF_STEPS))
def test_steps(name: str, layout: str) -> None:
    check(name, layout)


def test_64_virtual_ranks_are_ordinary() -> None:
    layout = "data=8 zero=3 tensor=4 seq=2"
    assert Layout.parse(layout).num_ranks == 64
    subject(SHORT)
    begin = time.perf_counter()
    check(SHORT, layout)
    assert time.perf_counter() - begin < 60.0  # a few seconds here; much slack for a busy machine
    assert_really_split(SHORT, program(SHORT, layout))


def test_verify_leaves_model_and_optimizer_as_they_are() -> None:
    step, model, optimizer, batches = zoo.CASES["sgd"].build()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    found = tutti.verify(step, model, optimizer, batches[0], "data=2")
    assert found.ok and bool(found) and found.first_difference is None
    assert str(found).startswith('verify "data=2": ok: the same step')
    assert optimizer is not None and not optimizer.state
    assert all(x.equal(before[n]) for n, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
