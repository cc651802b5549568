"""Deep models composed of pieces, against the whole program of the same layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import trained
from tutti.errors import LayoutError, ShardingError
from tutti.graph.ops.collectives import reduce_scatter
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.depth.composed import composed
from tutti.planner.depth.step_pieces import Blocks, Piece
from tutti.planner.estimates.graph_clock import COMPUTE
from tutti.planner.estimates.layout_estimate import estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates

WIDTH, ROWS, TOKENS, DEPTH = 2048, 16, 1024, 8
PLACE = {"*.up.weight": "tensor, -", "*.down.weight": "-, tensor"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1024, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture(scope="module")
def estimates() -> StepEstimates:
    with torch.device("meta"):
        model = Deep(DEPTH)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout(), place=PLACE)
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    return StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)


@pytest.fixture(scope="module")
def whole(estimates: StepEstimates) -> CandidatePrograms:
    return CandidatePrograms(estimates.job, estimates.batch)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "data=4",
        "data=4 zero=1",
        "data=4 zero=3",
        "data=2 micro=4",
        "data=2 tensor=2",
        "data=2 pipe=2 micro=4",
        "pipe=4 micro=8",
        "pipe=4 micro=8 schedule=zb",
        "pipe=4 micro=8 schedule=zb remat=full",
        "data=2 zero=3 remat=full",
        "data=2 zero=3 remat=0.5",
        "data=4 remat=0.3",
        "data=4 zero=3 micro=4",
        "data=2 tensor=2 zero=3 micro=4",
        "data=2 tensor=2 zero=3 remat=full",
        "tensor=4 remat=full",
        "data=2 pipe=2 zero=2 micro=4",
        "seq=4",
        "data=2 seq=2",
        "data=2 seq=2 zero=1",
        "seq=4 zero=3",
        "data=2 seq=2 pipe=2 zero=2 micro=4",
        "data=2 seq=2 tensor=2 micro=2",
    ],
)
def test_time_and_memory_are_near_those_of_the_whole_program(
    layout: str, estimates: StepEstimates, whole: CandidatePrograms
) -> None:
    parsed = Layout.parse(layout)
    near = estimates.refined(parsed)
    exact = estimate(whole.program(parsed), estimates.machine(parsed))
    assert near.timeline is None or near.timeline.schedule.num_stages >= 2
    assert near.seconds == pytest.approx(exact.seconds, rel=0.15)
    assert near.peak_nbytes == pytest.approx(exact.peak_nbytes, rel=0.35)
    if "pipe" not in layout:  # stages of the whole program may begin within a layer
        assert near.nbytes == pytest.approx(exact.nbytes, rel=0.005)
    if "remat" not in layout:
        assert near.seconds == pytest.approx(exact.seconds, rel=0.03)
        assert near.peak_nbytes == pytest.approx(exact.peak_nbytes, rel=0.12)


@pytest.fixture(scope="module")
def between_hosts() -> StepEstimates:
    """A step whose links take as long as its work, with a tied weight."""
    with torch.device("meta"):
        model = Deep(DEPTH)
        model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job.of(train_step, model, optimizer, Layout(precision="bf16"), place=PLACE)
    batch = (torch.zeros(256, 512, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("64 x h100"))
    return StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)


@pytest.fixture(scope="module")
def whole_between_hosts(between_hosts: StepEstimates) -> CandidatePrograms:
    return CandidatePrograms(between_hosts.job, between_hosts.batch, on_processors=False)


@pytest.mark.parametrize(
    ("layout", "time", "memory"),
    [
        ("data=64", 0.03, 0.02),
        ("data=64 zero=1", 0.05, 0.03),
        ("data=64 zero=2 micro=4", 0.05, 0.08),
        ("data=64 zero=3", 0.12, 0.12),
        ("data=64 zero=3 remat=full", 0.12, 0.22),
        ("data=64 micro=4 remat=full", 0.05, 0.05),
        ("data=16 pipe=4 zero=1 micro=8", 0.08, 0.15),
        ("data=16 pipe=4 zero=1 micro=8 remat=full", 0.08, 0.15),
        ("data=16 pipe=4 zero=2 micro=8", 0.1, 0.15),
    ],
)
def test_links_hide_as_little_as_in_the_whole_program(
    layout: str,
    time: float,
    memory: float,
    between_hosts: StepEstimates,
    whole_between_hosts: CandidatePrograms,
) -> None:
    """Sums run beside the backward alone, gathers one bucket ahead, each bucket with its latency. All weights
    of this model are two buckets."""
    parsed = Layout.parse(f"{layout} precision=bf16")
    near = between_hosts(parsed)
    exact = estimate(whole_between_hosts.program(parsed), between_hosts.machine(parsed))
    assert near.seconds == pytest.approx(exact.seconds, rel=time)
    assert near.peak_nbytes == pytest.approx(exact.peak_nbytes, rel=memory)


@pytest.mark.parametrize(
    "layout", ["data=64", "data=64 zero=1", "data=8 seq=8", "data=8 seq=8 zero=1", "data=16 seq=4"]
)
def test_buckets_of_a_small_model_span_a_part_of_its_graph(layout: str) -> None:
    """They are not full: less memory, and more sums beside the backward."""
    with torch.device("meta"):
        model = Deep(6, 512)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout(), place=PLACE)
    batch = (torch.zeros(64, 256, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("64 x h100"))
    near = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)(Layout.parse(layout))
    whole = CandidatePrograms(job, batch, on_processors=False).program(Layout.parse(layout))
    exact = estimate(whole, machine)
    assert near.seconds == pytest.approx(exact.seconds, rel=0.1)
    assert near.peak_nbytes == pytest.approx(exact.peak_nbytes, rel=0.1)
    for link in near.nbytes.keys() | exact.nbytes.keys():  # the loss takes a few bytes
        assert near.nbytes.get(link, 0) == pytest.approx(
            exact.nbytes.get(link, 0), rel=0.005, abs=64
        )


@pytest.mark.parametrize("schedule", ["", "gpipe", "interleaved(2)", "zb", "zbv"])
@pytest.mark.parametrize("micro", [4, 16])
def test_closed_forms_are_near_the_clock(
    schedule: str, micro: int, estimates: StepEstimates
) -> None:
    layout = replace(Layout.parse(f"pipe=4 micro={micro}"), schedule=schedule)
    blocks = estimates._blocks_of(layout, estimates.machine(layout))
    machine = estimates.machine(layout)
    played, closed = (
        composed(blocks, layout, machine),
        composed(blocks, layout, machine, played=False),
    )
    assert closed.seconds == pytest.approx(played.seconds, rel=0.2)
    assert closed.peak_nbytes == pytest.approx(played.peak_nbytes, rel=0.2)
    assert played.timeline is not None
    assert closed.timeline is None


def test_every_rank_is_given_the_whole_batch(estimates: StepEstimates) -> None:
    blocks = estimates.blocks(Layout.parse("data=4"))
    assert blocks.batch == 8 * ROWS * TOKENS


def test_weights_are_gathered_as_the_forward_reads_them(
    estimates: StepEstimates, mixed: StepEstimates
) -> None:
    for made, share in ((estimates, 1.0), (mixed, 0.5)):
        blocks = made.blocks(Layout())
        (((layer,), _),) = blocks.layers
        assert layer.read == layer.read_again == share * layer.parameters
        ends = blocks.first + blocks.last
        assert ends.read == share * ends.parameters
        assert ends.read_again == ends.read / 2  # of the head: a lookup's backward reads no weight


def test_gathers_before_the_first_layer_are_waited_for(estimates: StepEstimates) -> None:
    """Each micro-batch waits for the embedding's weights and for the sum of their gradients."""
    layer = Piece(
        forward=1.0,
        backward=2.0,
        parameters=4.0,
        gradients=4.0,
        read=4.0,
        read_again=4.0,
        num_sums=1.0,
        num_gathers=1.0,
        num_again=1.0,
    )
    embedding = replace(layer, forward=0.0, backward=0.0, gradients=1e9, read=1e9, read_again=0.0)
    blocks = Blocks(embedding, (((layer,), 8),), Piece(), 1.0)
    layout = Layout.parse("data=8 zero=3 micro=4")
    found = composed(blocks, layout, estimates.machine(layout))
    alone = composed(replace(blocks, first=Piece()), layout, estimates.machine(layout))
    seconds = 4 * 2 * (7 / 8 * 1e9) / 3.5e11  # of NVLink
    assert found.seconds - alone.seconds == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("schedule", ["interleaved(2)", "zb"])
def test_closed_forms_know_a_last_stage_with_large_logits(
    schedule: str, estimates: StepEstimates
) -> None:
    layer = Piece(forward=1.0, backward=2.0, inputs=1.0, kept=1e9, delayed=1e9)
    logits = Piece(forward=0.5, backward=1.0, inputs=0.5, kept=2e10, delayed=4e10)
    blocks = Blocks(Piece(kept=1e6), (((layer,), 7),), logits, 1e6)
    layout = replace(Layout.parse("pipe=4 micro=8"), schedule=schedule)
    machine = estimates.machine(layout)
    played, closed = (composed(blocks, layout, machine, played=x) for x in (True, False))
    assert closed.peak_nbytes == pytest.approx(played.peak_nbytes, rel=0.05)
    # Interleaved, it holds one micro-batch; with gradients of weights apart, those of all pipeline ranks.
    most = {"interleaved(2)": 2.5e10, "zb": 1.7e11}[schedule]
    assert 0.8 * most < played.peak_nbytes < most


def test_more_stages_than_layers_are_refused(estimates: StepEstimates) -> None:
    with pytest.raises(LayoutError, match="16 stages for 10 pieces"):
        estimates(Layout.parse("pipe=16 micro=16"))


def mixed_step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    """In bfloat16, by casts of all weights before the model runs; clips the gradients."""
    cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, cast, (tokens,))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@pytest.fixture(scope="module")
def mixed() -> StepEstimates:
    with torch.device("meta"):
        model = Deep(DEPTH)
    place = PLACE | {"embed.weight": "tensor, -"}
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job.of(mixed_step, model, optimizer, Layout(), place=place)
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    return StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)


def test_casts_gradients_and_updates_belong_to_their_layers(mixed: StepEstimates) -> None:
    blocks = mixed._blocks_of(Layout(), mixed.machine(Layout()))
    (((layer,), _),) = blocks.layers
    ends = blocks.first, blocks.last
    assert layer.gradients == layer.parameters == 2 * layer.cast
    assert sum(p.gradients for p in ends) == sum(p.parameters for p in ends)
    # Norm, clipping and AdamW move the bytes of one layer, not those of the other unit, too.
    moved = layer.update / layer.parameters
    assert sum(p.update for p in ends) / sum(p.parameters for p in ends) == pytest.approx(
        moved, rel=0.2
    )


def test_a_sum_of_the_embeddings_is_not_one_of_each_layer(mixed: StepEstimates) -> None:
    layout = Layout.parse("tensor=2")
    blocks = mixed._blocks_of(layout, mixed.machine(layout))
    (((layer,), _),) = blocks.layers
    value = 4 * ROWS * TOKENS * WIDTH  # sums are in float32
    assert layer.sent == pytest.approx(
        2 * value
    )  # one of the forward, one of the backward, 2 / 2 of it each
    assert blocks.first.sent == pytest.approx(value, rel=0.1)


def test_the_peak_is_that_of_the_dtype_of_most_operations(
    estimates: StepEstimates, mixed: StepEstimates
) -> None:
    made = estimates.dtype_of("fp32"), mixed.dtype_of(mixed.job.layout.precision)
    assert made == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("text", ["data=2 tensor=4", "tensor=4 micro=2", "tensor=4 pipe=2 micro=2"])
def test_tokens_are_split_between_the_blocks(text: str) -> None:
    """Without a place, by the search, in micro-batches and pipelines, too."""
    with torch.device("meta"):
        model = Deep(6)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    whole = CandidatePrograms(job, batch, on_processors=False)
    layout = Layout.parse(text)
    program = whole.program(layout)
    assert any(n.target is reduce_scatter for n in program.graph.nodes)
    exact = estimate(program, machine)
    assert made.refined(layout).seconds == pytest.approx(exact.seconds, rel=0.15)
    sent = exact.nbytes["inside"]
    near = 0.12 if "pipe" in text else 0.01  # a program may be cut within a layer
    assert made.refined(layout).nbytes["inside"] == pytest.approx(sent, rel=near)


def test_masks_of_dropout_belong_to_a_micro_batch() -> None:
    with torch.device("meta"):
        model = Deep(6)
        for block in model.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.1))  # type: ignore[union-attr]
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    (((layer,), _),) = made._blocks_of(Layout(), machine).layers
    assert layer.cast == 0  # weights stay in float32: nothing is kept for all micro-batches


def test_a_last_stage_may_keep_nothing() -> None:
    """Its pieces let go of the last layer's output, and a part of none is none."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    step = trained(lambda model, x: F.mse_loss(model(x), x))
    job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout())
    machine = PricedMachine.of(Cluster.parse("4 x h100"))
    made = StepEstimates(job, (torch.zeros(8, 64),), lambda _: machine, num_layouts=100_000)
    for words in ("pipe=4 micro=2 remat=full", "pipe=4 micro=4 schedule=zb remat=full"):
        assert made(Layout.parse(words)).peak_nbytes > 0


def _layers(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), norm(64)) for _ in range(6)))


def _evaluated_after_its_update(m: nn.Module, o: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    trained(lambda m, x: F.mse_loss(m(x), x))(m, o, x)
    return F.mse_loss(m(x), x).detach()


@pytest.mark.parametrize(
    ("layout", "model", "step", "words"),
    [
        (
            "data=2 micro=4",
            _layers(nn.BatchNorm1d),
            trained(lambda m, x: F.mse_loss(m(x), x)),
            "samples",
        ),
        ("pipe=4 micro=6", _layers(nn.LayerNorm), _evaluated_after_its_update, "an update"),
    ],
)
def test_what_a_step_refuses_is_no_estimate(
    layout: str, model: nn.Module, step: Any, words: str
) -> None:
    """Of steps without micro-batches the pieces are right; the program itself says no."""
    job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout())
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, (torch.zeros(24, 64),), lambda _: machine, num_layouts=100_000)
    assert made._is_composed
    for _ in range(2):
        with pytest.raises((LayoutError, ShardingError), match=words):
            made(Layout.parse(layout))
    assert made(Layout.parse("data=2")).seconds > 0


def test_a_pipeline_of_one_micro_batch_couples_no_samples() -> None:
    step = trained(lambda m, x: F.mse_loss(m(x), x))
    model = _layers(nn.BatchNorm1d)
    job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout())
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, (torch.zeros(24, 64),), lambda _: machine, num_layouts=100_000)
    assert made(Layout.parse("pipe=2")).seconds > 0
    with pytest.raises(ShardingError, match="micro=4"):
        made(Layout.parse("pipe=2 micro=4"))
    assert made(Layout.parse("pipe=2")).seconds > 0


def test_layers_count(estimates: StepEstimates) -> None:
    blocks = estimates._blocks_of(Layout(), estimates.machine(Layout()))
    assert len(list(blocks.sequence())) == DEPTH
    (((layer,), _),) = blocks.layers
    assert layer.parameters == 4 * (8 * WIDTH * WIDTH + 2 * WIDTH)
    assert blocks.first.parameters == blocks.last.parameters == 4 * 1024 * WIDTH
    assert layer.slots == pytest.approx(2 * layer.parameters, rel=1e-3)
    assert layer.gradients == layer.parameters


def test_operations_count_every_layer(estimates: StepEstimates) -> None:
    tokens = ROWS * TOKENS
    layer, head = 8 * WIDTH * WIDTH, WIDTH * 1024
    assert estimates.flops() == pytest.approx(6 * tokens * (DEPTH * layer + head), rel=1e-6)


class TwoKinds(Deep):
    """Narrow layers, then wide ones, in one container."""

    def __init__(self) -> None:
        super().__init__(0)
        wide = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.blocks.extend([*(nn.Linear(WIDTH, WIDTH) for _ in range(5)), *wide])


def test_operations_of_two_kinds_of_layers_are_counted_apart() -> None:
    with torch.device("meta"):
        model = TwoKinds()
    job = Job.of(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), Layout())
    batch = (torch.zeros(ROWS, TOKENS, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    deep = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    whole = StepEstimates(job, batch, lambda _: machine)
    assert deep._is_composed
    assert not whole._is_composed
    assert deep.flops() == pytest.approx(whole.flops(), rel=1e-6)


@pytest.mark.parametrize("layout", ["data=8", "data=8 zero=3", "data=4 tensor=2 remat=full"])
def test_compute_is_for_arithmetic_memory_and_launches_as_in_the_whole_program(
    estimates: StepEstimates, whole: CandidatePrograms, layout: str
) -> None:
    parsed = Layout.parse(layout)
    machine = estimates.machine(parsed)
    made, expected = estimates.refined(parsed), estimate(whole.program(parsed), machine)
    assert made.bound_by == expected.bound_by
    for one in (made, expected):
        assert sum(one.limits.values()) == pytest.approx(one.kinds[COMPUTE], rel=1e-6)
    for limit, seconds in expected.limits.items():
        share = seconds / expected.kinds[COMPUTE]
        assert made.limits[limit] / made.kinds[COMPUTE] == pytest.approx(share, abs=0.03)


def test_a_small_model_is_bound_by_launches() -> None:
    model = Deep(DEPTH, width=32)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(ROWS, 16, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("1 x h100"))
    made = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    assert made.refined(Layout()).bound_by == "launches"


@pytest.mark.parametrize("layout", ["data=4 pipe=2 micro=4 zero=2", "data=4 pipe=2 micro=4 zero=3"])
def test_small_layers_of_a_stage_share_a_bucket_of_gradients(layout: str) -> None:
    """Their gradients are there until the last of them: a stage holds nearly all of its own."""
    with torch.device("meta"):
        model = Deep(DEPTH, width=512)
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(ROWS, 128, dtype=torch.long),)
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, batch, lambda _: machine, num_layouts=100_000)
    parsed = Layout.parse(layout)
    expected = estimate(CandidatePrograms(job, batch, on_processors=False).program(parsed), machine)
    assert made.refined(parsed).peak_nbytes == pytest.approx(expected.peak_nbytes, rel=0.1)
