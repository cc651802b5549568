"""The predicted peak against what the allocator counts, on one device and on real ranks."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import skip_init

import gloo_releases
import tutti
import zoo
import zoo_steps
from captured_once import captured_once
from ranks import Ranks
from subjects import program
from tutti.capture.step import capture
from tutti.execution.measure import peak_nbytes
from tutti.graph.analysis.scratch import borrowed
from tutti.graph.analysis.storage import Storages
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.passes.bucket import BUCKET_NBYTES
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.planner.estimates.layout_estimate import estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.memory import predict, predict_pipe_ranks
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.propagate.plan import plan
from tutti.report.collective_records import num_sent
from ways import GLOO, by

sys.path.append(str(Path(__file__).parents[2] / "examples"))
gpt: Any = importlib.import_module("gpt")

aten = torch.ops.aten
TOLERANCE = 0.05


def gpt_case(vocab: int, window: int, width: int, depth: int, batch: int) -> tuple[Any, ...]:
    """The example's GPT of other sizes, its step, and a batch."""
    gpt.VOCABULARY, gpt.WINDOW = vocab, window
    torch.manual_seed(0)
    model = gpt.GPT(width, depth, 4, 0.1)
    tokens, targets = torch.randint(0, vocab, (2, batch, window))
    return gpt.train_step, model, torch.optim.AdamW(model.parameters()), (tokens, targets)


def zoo_case(make: Callable[[], nn.Module], batch: Callable[[], Any], opt: Any) -> tuple[Any, ...]:
    """A Hugging Face model with the loss of its own."""
    torch.manual_seed(0)
    model = make().train()
    return zoo_steps.labels_step, model, opt(model), batch()


LLAMA = partial(
    zoo.hf, "LlamaForCausalLM", "LlamaConfig", vocab_size=256, hidden_size=64, head_dim=16,
    intermediate_size=192, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip


def many_small_case() -> tuple[Any, ...]:
    """Layers whose weights are too small for buffers in shared memory."""
    torch.manual_seed(0)
    layers = [x for _ in range(6) for x in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(20, 64), *layers, nn.Linear(64, 4))
    batch = torch.randn(16, 20), torch.randint(0, 4, (16,))
    return _cross_entropy_step, model, torch.optim.AdamW(model.parameters()), batch


def _cross_entropy_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


RESNET = partial(
    zoo.hf, "ResNetForImageClassification", "ResNetConfig", embedding_size=16,
    hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=8,
)  # fmt: skip


def _tokens() -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(0, 256, (2, 8, 64))
    return tokens, labels


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 48, 48), torch.randint(0, 8, (16,))


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt": partial(gpt_case, 256, 64, 64, 2, 8),
    "wide vocabulary": partial(gpt_case, 4096, 32, 64, 1, 2),
    "wide": partial(gpt_case, 256, 32, 256, 2, 4),
    "llama": partial(zoo_case, LLAMA, _tokens, zoo.adamw),
    "resnet": partial(zoo_case, RESNET, _images, zoo.sgd),
    "many small": many_small_case,
}


def played(name: str, layout: str, num_steps: int) -> tuple[tutti.Step, Any]:
    """A step that has been played, and its batch."""
    train_step, model, optimizer, batch = CASES[name]()
    place = gpt.PLACE if "tensor" in layout else None
    step = tutti.distribute(train_step, model, optimizer, layout, place=place)
    with captured_once(name):
        for _ in range(num_steps):
            step(*batch)
    return step, batch


def capture_of(name: str) -> None:
    """Capture the program, which may take two calls; a rank that has it needs no capture of its own."""
    played(name, "", 2)


def predicted_and_measured(name: str, layout: str, way: str = "") -> tuple[int, int]:
    """Bytes at the peak of a later call, beside those held before it."""
    with by(way) if way else contextlib.nullcontext():
        step, batch = played(name, layout, 2)
    assert step._last is not None
    execution = step._last.execution
    predicted = predict(execution.program, execution.graph).call_nbytes
    with gloo_releases.waited_for():
        measured = peak_nbytes(lambda: step(*batch))[0]
    return predicted, measured


def check(ranks: Ranks, name: str, layout: str, way: str = "") -> None:
    """Of every rank. A busy host counts one call in thousands wrong: then the middle of three counts."""
    captured, n = ranks.after(capture_of, name), Layout.parse(layout).num_ranks

    def measure() -> list[tuple[int, int]]:
        return captured.run(predicted_and_measured, name, layout, way, n=n)

    found = [measure()]
    if any(predicted != pytest.approx(measured, rel=TOLERANCE) for predicted, measured in found[0]):
        found += [measure(), measure()]
    for of_rank in zip(*found, strict=True):
        predicted, measured = sorted(of_rank, key=lambda one: one[1])[len(found) // 2]
        assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("name", list(CASES))
def test_on_one_device(ranks: Ranks, name: str) -> None:
    check(ranks, name, "")


LAYOUTS = [f"data=2 zero={level}" for level in range(4)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(["gpt"], LAYOUTS[1::2]),
        *itertools.product(["wide"], LAYOUTS[::3]),
        *itertools.product(["wide vocabulary"], LAYOUTS[1:3]),
        *(("llama", LAYOUTS[3]), ("resnet", LAYOUTS[0])),
        ("gpt", "tensor=2"),
    ],
)
def test_on_two_ranks(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout)


def without_and_with_a_run(name: str, layout: str) -> tuple[int, int]:
    """The peak predicted for a program, and for the graph that this rank ran."""
    step, _ = played(name, layout, 1)
    assert step._last is not None
    execution = step._last.execution
    return predict(step.program).peak_nbytes, predict(
        execution.program, execution.graph
    ).peak_nbytes


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "data=2 micro=2"])
def test_a_prediction_without_a_run_is_that_of_a_run_on_this_host(
    ranks: Ranks, layout: str
) -> None:
    captured = ranks.after(capture_of, "wide")
    for before, after in captured.run(without_and_with_a_run, "wide", layout, n=2):
        assert before == after


@pytest.mark.parametrize("layout", LAYOUTS[::3])
def test_packed_collectives(ranks: Ranks, layout: str) -> None:
    """A sum of small tensors packs them; its results lie in one piece."""
    check(ranks, "many small", layout)


@pytest.mark.parametrize(
    ("name", "layout"), [*itertools.product(["many small", "wide"], LAYOUTS[::3])]
)
def test_without_shared_memory(ranks: Ranks, name: str, layout: str) -> None:
    """Collectives run beside the computation: their results exist from the start, and are measured."""
    check(ranks, name, layout, GLOO)


def test_a_plan_for_gpus_counts_no_buffers_of_gloo() -> None:
    """The steps of a plan are captured with CPU tensors."""
    made = program("gpt", "data=2 zero=1")
    donated = frozenset(made.captured.updated)
    graphs = (optimized(made, Target(donated=donated, gpus=gpus)) for gpus in (False, True))
    by_gloo, on_gpus = (predict(made, graph).peak_nbytes for graph in graphs)
    assert on_gpus < by_gloo
    machine = PricedMachine.of(Cluster.parse("2 x h100"))
    assert estimate(made, machine).peak_nbytes == on_gpus


TIMED = ["pipe=2 micro=4", "pipe=2 micro=4 schedule=gpipe", "pipe=2 micro=4 schedule=zb"]


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", TIMED[0]), *itertools.product(["gpt"], TIMED[1:])]
)
def test_at_each_place_of_a_pipeline(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout)


# Whole gradients, and parts of them, in the parts of a loop and after them.
SHARDED = ["data=2 zero=1 micro=2", "data=2 zero=3 micro=2", "pipe=2 data=2 zero=3 micro=2"]


@pytest.mark.parametrize("layout", SHARDED)
def test_sharded_state_in_micro_batches(ranks: Ranks, layout: str) -> None:
    check(ranks, "wide", layout)


def test_in_micro_batches(ranks: Ranks) -> None:
    check(ranks, "gpt", "micro=4")


def test_pipe_ranks_keep_all_state_once_and_the_schedule_says_what_is_under_way() -> None:
    whole = predict(program("gpt", "")).state_nbytes
    held = {}
    for schedule in ("gpipe", "1f1b"):
        made = program("gpt", f"pipe=2 micro=8 schedule={schedule}")
        pipe_ranks = predict_pipe_ranks(in_time(made))
        assert sum(memory.state_nbytes for memory in pipe_ranks) == whole
        for memory in pipe_ranks:
            kinds = (memory.state_nbytes, memory.gradient_nbytes, memory.activation_nbytes)
            assert sum(kinds) + memory.other_nbytes == memory.peak_nbytes
        assert predict(made).peak_nbytes == max(memory.peak_nbytes for memory in pipe_ranks)
        held[schedule] = [memory.activation_nbytes for memory in pipe_ranks]
    # gpipe holds 8 micro-batches at either place, 1f1b two and one.
    assert held["gpipe"][0] > 3 * held["1f1b"][0] and held["gpipe"][1] > 6 * held["1f1b"][1]


def test_the_kinds_add_up_and_state_is_what_the_layout_keeps() -> None:
    for layout in ("", "data=2", "data=2 zero=3"):
        made = program("gpt", layout)
        found = predict(made)
        kinds = (found.state_nbytes, found.gradient_nbytes, found.activation_nbytes)
        assert sum(kinds) + found.other_nbytes == found.peak_nbytes
        kept = {s.name: made.storage[s.name].local_shape(made.mesh) for s in made.captured.state}
        sizes = {s.name: s.tensor.element_size() for s in made.captured.state}
        assert found.state_nbytes == sum(math.prod(kept[n]) * sizes[n] for n in kept)
        assert found.source and found.op and found.region
        assert all(a.nbytes >= b.nbytes for a, b in itertools.pairwise(found.largest))


def _thin(depth: int) -> Program:
    """`depth` weights of 4 MB under `zero=3`; a batch of few rows needs next to no other memory."""
    model = nn.Sequential(*(skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(depth)))

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(step, model, optimizer, (torch.ones(8, 1024),))
    return partition(plan(captured, Layout.parse("data=4 zero=3"), None))


@pytest.mark.parametrize("depth", [24, 48])
def test_whole_gradients_do_not_wait_for_the_update(depth: int) -> None:
    """Beside a shard of each gradient until the update, whole ones are alive in two buckets at most.

    Gloo sends one of them from a copy, and receives as many bytes.
    """
    shard = 1024**2
    assert predict(_thin(depth)).call_nbytes < depth * shard + 4 * BUCKET_NBYTES


def hand_made() -> Program:
    """Three values of 400 bytes, one a view, one written over: at most two are held."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        x = graph.placeholder("x")
        x.meta |= {"val": torch.empty(10, 10), "kind": "batch"}
        node = x
        for target, args in (
            (aten.exp.default, ()),
            (aten.permute.default, ([1, 0],)),
            (aten.neg.default, ()),
            (aten.sin_.default, ()),
        ):
            node = graph.call_function(target, (node, *args))
            node.meta |= {"val": torch.empty(10, 10), "region": "forward", "source": f"{target}"}
        graph.output(([node], []))
    return cast(Program, SimpleNamespace(graph=graph, captured=SimpleNamespace(mode=mode)))


def sum_of_squares_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_buffers_of_several_values_are_named_so() -> None:
    """Gradients of three weights of 1 MB in one block of shared memory."""
    layers = (nn.Linear(512, 512, bias=False) for _ in range(3))
    model = nn.Sequential(*layers)
    job = Job.of(sum_of_squares_step, model, torch.optim.SGD(model.parameters(), lr=0.1), Layout())
    program = CandidatePrograms(job, (torch.randn(8, 512),)).program(Layout.parse("data=2"))
    target = Target(donated=frozenset(program.captured.updated), shared=frozenset({("data",)}))
    graph = optimized(program, target)
    largest = predict(program, graph).largest[0]
    assert (largest.name, largest.shape) == ("3 buffers in shared memory", ())
    assert largest.nbytes == 3 * 4 * 512 * 512
    assert len(program.collectives) > num_sent(graph) >= 1


def test_views_share_and_in_place_ops_reuse() -> None:
    made = hand_made()
    found = predict(made, made.graph)
    assert found.call_nbytes == 800 and found.peak_nbytes == 1200
    assert (found.op, found.activation_nbytes, found.other_nbytes) == ("neg", 800, 400)
    assert [h.nbytes for h in found.largest] == [400, 400, 400]


@pytest.mark.parametrize(
    "name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "huber_loss"]
)
@pytest.mark.parametrize("reduction", [0, 1])
def test_a_loss_that_is_one_number_may_keep_the_memory_of_all(name: str, reduction: int) -> None:
    op = getattr(aten, name).default
    options = {"binary_cross_entropy": (None, reduction)}.get(name, (reduction,))
    mode, graph = FakeTensorMode(), fx.Graph()
    x, y = (graph.placeholder(n) for n in "xy")
    with mode:
        x.meta["val"] = y.meta["val"] = torch.empty(64, 1024)
    loss = graph.call_function(op, (x, y, *options))
    with mode:
        loss.meta["val"] = op(x.meta["val"], y.meta["val"], *options)
    graph.output(([loss], []))
    storages = Storages(graph, mode)
    given = torch.rand(2, 64, 1024).unbind()
    peak, result = peak_nbytes(lambda: op(*given, *options))
    (block,) = storages.of[loss]
    assert block.nbytes == result.untyped_storage().nbytes()
    assert abs(block.nbytes + borrowed(loss, storages) - peak) <= 64
