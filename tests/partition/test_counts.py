"""Exact counts and bytes: the collectives of a program are those that the textbook layout has."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tutti
import zoo
import zoo_models
from subjects import program
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.report.explanation import Record, records
from tutti.verification.verdict import Subject
from zoo_steps import BATCH, SEQ, plain_step, token_batch

HIDDEN, NUM_LAYERS, HANDFUL = 32, 2, 4
ACTIVATION = BATCH * SEQ * HIDDEN
# resnet apart: its batch norms exchange statistics, see the test of its own.
MODELS = ("gpt", "gpt_tied", "llama", "gpt2", "bert", "t5", "vit", "qwen3", "sgd", "lstm")
CASE = pytest.mark.parametrize(("name", "ways"), [*((n, 2) for n in MODELS), ("gpt", 4), ("t5", 4)])


def kind(node: fx.Node) -> str:
    """all_reduce, all_gather, reduce_scatter or all_to_all."""
    return node.target.__name__  # type: ignore[union-attr]


def numel(node: fx.Node) -> int:
    """Elements of the larger of what goes in and what comes out."""
    operand: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    return max(operand.numel(), node.meta["val"].numel())


def gradients(made: Program) -> list[fx.Node]:
    """The collectives that bring a gradient into the update."""
    marks = {m for m, b in made.plan.boundaries.items() if b.into == "update"}
    return [n for n in made.collectives if n.meta["user"] in marks and numel(n) > 1]


def weights(made: Program) -> dict[str, list[fx.Node]]:
    """By parameter the collectives that move its value: for forward, for backward, back to storage."""
    new = dict(zip(made.captured.output[1], made.captured.updated, strict=True))
    found: dict[str, list[fx.Node]] = {}
    for n in made.collectives:
        mark = made.plan.boundaries.get(n.meta["user"])
        value = n.meta["value"]
        name = mark.parameter if mark else new.get(value, "")
        if made.captured.kinds.get(name) == "parameter":
            found.setdefault(name, []).append(n)
    return found


def parameters(made: Program) -> dict[str, int]:
    """Elements by parameter, tied ones once."""
    return {s.name: s.tensor.numel() for s in made.captured.state if s.kind == "parameter"}


def nbytes(found: list[Record]) -> int:
    """What each rank sends for these collectives."""
    return sum(r.nbytes for r in found)


def records_of(made: Program, nodes: list[fx.Node]) -> list[Record]:
    """The records of these collectives."""
    chosen = set(nodes)
    return [r for n, r in zip(made.collectives, records(made), strict=True) if n in chosen]


@CASE
def test_data_parallel_reduces_each_gradient_once(name: str, ways: int) -> None:
    made = program(name, f"data={ways}")
    sizes, moved = parameters(made), gradients(made)
    assert {kind(n) for n in moved} == {"all_reduce"}
    assert sorted(numel(n) for n in moved) == sorted(sizes.values())
    rest = [n for n in made.collectives if n not in moved]
    assert all(kind(n) == "all_reduce" and numel(n) <= HANDFUL for n in rest)
    # A ring moves 2 (n - 1) / n of each gradient; whole bytes are counted.
    total = 2 * (ways - 1) / ways * 4 * sum(sizes.values())
    assert nbytes(records_of(made, moved)) == pytest.approx(total, abs=len(moved))


@pytest.mark.parametrize("ways", [2, 4])
def test_a_batch_norm_adds_vectors_of_its_channels_only(ways: int) -> None:
    """Statistics over the whole batch, as on one device, take a few numbers a channel."""
    made = program("resnet", f"data={ways}")
    sizes, moved = parameters(made), gradients(made)
    norms = {n for n, s in made.captured.kinds.items() if n.endswith("running_mean")}
    channels = max(sizes[n.replace("running_mean", "weight")] for n in norms)
    kernels = [k for n, k in sizes.items() if k > channels]
    large = [n for n in made.collectives if numel(n) > channels]
    assert sorted(numel(n) for n in large) == sorted(kernels)
    assert set(large) <= set(moved)
    assert {kind(n) for n in made.collectives} == {"all_reduce"}


@CASE
def test_sharded_slots_reduce_scatter_once_and_gather_once(name: str, ways: int) -> None:
    made = program(name, f"data={ways} zero={2 if name == 'gpt' else 1}")
    assert not made.plan.reasons, "every parameter of these models has a dim that divides"
    sizes, moved, gathered = parameters(made), gradients(made), weights(made)
    assert {kind(n) for n in moved} == {"reduce_scatter"}
    assert sorted(numel(n) for n in moved) == sorted(sizes.values())
    assert set(gathered) == set(sizes)
    assert all([kind(n) for n in nodes] == ["all_gather"] for nodes in gathered.values())
    rest = set(made.collectives) - {*moved, *(n for nodes in gathered.values() for n in nodes)}
    assert all(kind(n) == "all_reduce" and numel(n) <= HANDFUL for n in rest)
    # Together they move what the all-reduce of the gradients moves.
    pairs = [*moved, *(n for nodes in gathered.values() for n in nodes)]
    total = 2 * (ways - 1) / ways * 4 * sum(sizes.values())
    assert nbytes(records_of(made, pairs)) == pytest.approx(total, abs=len(pairs))


@CASE
def test_sharded_parameters_are_gathered_at_most_twice(name: str, ways: int) -> None:
    made = program(name, f"data={ways} zero=3")
    sizes, moved, gathered = parameters(made), gradients(made), weights(made)
    assert {kind(n) for n in moved} == {"reduce_scatter"}
    assert sorted(numel(n) for n in moved) == sorted(sizes.values())
    assert set(gathered) == set(sizes)
    for nodes in gathered.values():
        assert {kind(n) for n in nodes} == {"all_gather"}
        regions = [n.meta["user"].meta["region"] for n in nodes]
        assert len(set(regions)) == len(regions) <= 2
        assert set(regions) <= {"forward", "backward"}
    forward = [n for nodes in gathered.values() for n in nodes[:1]]
    total = (ways - 1) / ways * 4 * sum(sizes.values())
    assert nbytes(records_of(made, forward)) == pytest.approx(total, abs=len(forward))


def per_layer(made: Program, prefix: str) -> Counter[tuple[str, str, str]]:
    """Collectives on activations by layer, region and kind."""
    found: Counter[tuple[str, str, str]] = Counter()
    for n in made.collectives:
        user, value = n.meta["user"], n.meta["value"]
        if user in made.plan.boundaries or user.op == "output" or numel(n) <= HIDDEN * SEQ:
            continue
        module = value.meta.get("module") or ""
        if not module.startswith(prefix):
            module = user.meta.get("module") or ""
        layer = module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else ""
        found[layer, user.meta["region"], kind(n)] += 1
    return found


@pytest.mark.parametrize(("name", "prefix"), [("gpt", "blocks."), ("llama", "model.layers.")])
@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4"])
def test_megatron_reduces_twice_a_layer_and_direction(name: str, prefix: str, layout: str) -> None:
    made = program(name, layout)
    head = (
        1 if name == "llama" else 0
    )  # its vocabulary is split: the head's input gradient is a sum
    expected = {
        (str(layer), region, "all_reduce"): 2
        for layer in range(NUM_LAYERS)
        for region in ("forward", "backward")
    } | ({("", "backward", "all_reduce"): 1} if head else {})
    assert per_layer(made, prefix) == expected
    large = [n for n in made.collectives if numel(n) > BATCH * SEQ]
    assert all(numel(n) == ACTIVATION for n in large)
    assert len(large) == 4 * NUM_LAYERS + head
    # The split vocabulary: maximum and sum of the softmax, and the sum of its backward, one a token.
    assert Counter(numel(n) for n in made.collectives)[BATCH * SEQ] == 3 * head
    ways = made.mesh.size("tensor")
    one = int(2 * (ways - 1) / ways * 4 * ACTIVATION)
    assert {r.nbytes for r in records_of(made, large)} == {one}


SEQUENCE = "data, tensor, -"


class Block(zoo_models.Block):
    """A block whose residual stream is split over the sequence between its parts."""

    def forward(self, x: Tensor) -> Tensor:
        x = tutti.shard_as(x + self.attn(self.norm1(x)), SEQUENCE)
        return tutti.shard_as(x + self.down(F.gelu(self.up(self.norm2(x)))), SEQUENCE)


class SequenceGPT(zoo_models.GPT):
    """The zoo's GPT with Megatron's sequence parallelism asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN, 4, 0.0) for _ in range(NUM_LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = tutti.shard_as(self.embed(tokens) + self.pos(positions), SEQUENCE)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.fixture(scope="module")
def sequence_parallel() -> Subject:
    torch.manual_seed(0)
    model = SequenceGPT()
    return Subject(plain_step, model, zoo.adamw(model), token_batch(0))


@pytest.mark.parametrize("layout", ["tensor=4", "data=2 tensor=2"])
def test_sequence_parallelism_splits_each_reduction_in_two(
    sequence_parallel: Subject, layout: str
) -> None:
    made = sequence_parallel.program(Layout.parse(layout), zoo.PLACE_GPT)
    assert sequence_parallel.verdict(made.layout, program=made).ok
    found = per_layer(made, "blocks.")
    assert found == {
        (str(layer), region, kind): 2
        for layer in range(NUM_LAYERS)
        for region in ("forward", "backward")
        for kind in ("reduce_scatter", "all_gather")
    }
    # The same bytes as the all-reduces that they stand for.
    large = [
        n
        for n in made.collectives
        if numel(n) == ACTIVATION // made.mesh.size({"data"} & set(made.mesh))
    ]
    ways = made.mesh.size("tensor")
    activation = [n for n in large if n.args[1] == ("tensor",)]
    assert len(activation) == 8 * NUM_LAYERS
    total = 4 * NUM_LAYERS * 2 * (ways - 1) / ways * 4 * numel(activation[0])
    assert nbytes(records_of(made, activation)) == total


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_axes_do_not_mix(name: str) -> None:
    """Data and tensor parallelism together are each what they are alone."""
    made = program(name, "data=2 tensor=2")
    over = Counter(n.args[1] for n in made.collectives if numel(n) > BATCH * SEQ)
    alone = program(name, "tensor=2")
    large = sum(numel(n) > BATCH * SEQ for n in alone.collectives)
    activations = [
        n for n in made.collectives if n.args[1] == ("tensor",) and numel(n) == ACTIVATION // 2
    ]
    assert len(activations) == large
    assert set(over) <= {("data",), ("tensor",)}
    shapes = Counter(
        math.prod(made.plan.compute[name].local_shape(made.mesh)) for name in parameters(made)
    )
    assert Counter(numel(n) for n in gradients(made)) == shapes
