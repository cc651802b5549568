"""The time of a program on a device of round numbers, against counts by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.costs.collective_seconds import collective_seconds
from tutti.costs.rank_groups import RankGroups
from tutti.hardware.cluster import Cluster
from tutti.hardware.figures import Figure
from tutti.job import Job
from tutti.layout import Layout
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.planner.estimates.graph_clock import COLLECTIVES, COMPUTE, IDLE, SHARED, kinds_of
from tutti.planner.estimates.layout_estimate import Estimate, estimate, flops_of_nodes
from tutti.planner.estimates.priced_machine import PricedKernels, PricedMachine
from tutti.planner.memory import predict
from tutti.planning.candidate_programs import CandidatePrograms

WIDTH = 64


def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def programs(depth: int = 4, rows: int = 8) -> CandidatePrograms:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job.of(train_step, model, optimizer, Layout())
    return CandidatePrograms(job, (torch.randn(rows, WIDTH),))


def _name(node: Any) -> str:
    return getattr(node.target, "__name__", "")


def second_a_matmul(devices: str) -> PricedMachine:
    """Each matmul takes a second, and no other kernel takes time."""

    def kernels(graph: Any) -> PricedKernels:
        return PricedKernels({n: 1.0 for n in graph.nodes if re.match("mm|addmm|linear", _name(n))})

    return PricedMachine(Cluster.parse(devices), kernels, launch_seconds=0.0)


def estimated(layout: str, devices: str = "8 x h100", **options: int) -> Estimate:
    return estimate(programs(**options).program(Layout.parse(layout)), second_a_matmul(devices))


def test_one_device_takes_the_sum_of_its_kernels() -> None:
    made = estimated("")
    # A forward and a gradient of weights for each layer, a gradient of inputs for all but the first.
    assert made.seconds == pytest.approx(4 + 4 + 3)
    assert made.kinds == {COMPUTE: made.seconds}
    assert made.nbytes == {}


def test_a_peak_is_the_predicted_one() -> None:
    program = programs().program(Layout.parse("data=2 zero=3"))
    made = estimate(program, PricedMachine.of(Cluster.parse("2 x h100")))
    target = Target(donated=frozenset(program.captured.updated), gpus=True)
    assert made.peak_nbytes == predict(program, optimized(program, target)).peak_nbytes


@pytest.mark.parametrize("layout", ["data=2", "data=2 micro=2", "pipe=2 data=2 micro=2"])
def test_ranks_of_a_host_have_the_peak_of_a_run(layout: str) -> None:
    """With its buffers in shared memory, also of sums over ranks and micro-batches."""
    program = programs().program(Layout.parse(layout))
    machine = replace(second_a_matmul("4 x h100"), shares_memory=True)
    assert estimate(program, machine).peak_nbytes == predict(program).peak_nbytes
    apart = replace(machine, shares_memory=False)
    assert estimate(program, apart).peak_nbytes != predict(program).peak_nbytes


def test_gradients_are_summed_beside_the_backward() -> None:
    made = estimated("data=2")
    compute, waiting = made.kinds[COMPUTE], made.kinds[COLLECTIVES]
    assert made.seconds == pytest.approx(compute + waiting)
    machine = second_a_matmul("8 x h100")
    group = RankGroups(Layout.parse("data=2").mesh, 8)["data",]
    whole = 4 * 4 * WIDTH * WIDTH
    assert made.nbytes["inside"] >= whole  # 2 (n - 1) / n of it
    assert waiting < 10 * collective_seconds("all_reduce", whole, group, machine.topology)


@pytest.mark.parametrize("micro", [4, 8])
def test_a_pipeline_has_the_bubble_of_its_schedule(micro: int) -> None:
    made = estimated(f"pipe=2 micro={micro}", rows=16)
    timeline = made.timeline
    assert timeline is not None
    longest = max(math.fsum(s.end - s.start for s in row) for row in timeline.rows)
    # 1F1B: the second stage waits for one forward of the first, and the first for one backward.
    assert longest < timeline.seconds < longest * (micro + 2) / micro
    assert made.kinds[IDLE] > 0


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "micro=4",
        "data=2 zero=3",
        "tensor=2 micro=2",
        "pipe=2 micro=4",
        "pipe=2 micro=2 schedule=gpipe",
        "pipe=4 micro=4 schedule=zb",
        "pipe=2 micro=4 schedule=interleaved(2)",
        "pipe=2 micro=4 schedule=zbv",
        "data=2 pipe=2 micro=2 zero=1",
        "data=2 pipe=2 micro=4 zero=2",
        "data=2 pipe=2 micro=2 zero=3",
        "data=8 pipe=2 micro=1",
        "tensor=2 pipe=2 micro=2",
        "pipe=2 micro=4 remat=full",
    ],
)
@pytest.mark.parametrize("ranks_per_processor", [1.0, 2.0])
def test_the_kinds_of_time_are_the_step(layout: str, ranks_per_processor: float) -> None:
    """The ends of the step count, too: ranks that have fewer layers wait there for the others."""
    torch.manual_seed(0)
    sizes = [(256, 64), (64, 512), (512, 64), (64, 256), (256, 8)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job.of(train_step, model, optimizer, Layout())
    made_of = CandidatePrograms(job, (torch.randn(32, 256),), on_processors=False)
    program = made_of.program(Layout.parse(layout))
    machine = PricedMachine.of(Cluster.parse("16 x h100"))
    machine = replace(machine, ranks_per_processor=ranks_per_processor, call_seconds=1e-4)
    made = estimate(program, machine)
    assert sum(made.kinds.values()) == pytest.approx(made.seconds, abs=4e-9)


def test_a_kind_of_rounding_alone_is_none() -> None:
    """0.1 + 0.2 - 0.3 is 5.6e-17."""
    assert kinds_of({COMPUTE: 0.1, SHARED: 0.1 + 0.2 - 0.3, IDLE: -1e-19}) == {COMPUTE: 0.1}
    machine = replace(second_a_matmul("2 x h100"), call_seconds=0.1)
    for layout in ("data=2 micro=4", "pipe=2 micro=2"):
        made = estimate(programs().program(Layout.parse(layout)), machine)
        assert min(made.kinds.values()) > 1e-9 and SHARED not in made.kinds


def test_ranks_that_share_memory_copy_their_messages() -> None:
    """Each of 8 micro-batches costs the longer of two equal stages a copy there, and one back."""
    program = programs(rows=16).program(Layout.parse("pipe=2 micro=8"))
    machine = replace(second_a_matmul("8 x h100"), shares_memory=True)
    apart, together = (
        estimate(program, replace(machine, value_start=seconds)).timeline for seconds in (0.0, 0.1)
    )
    assert apart is not None and together is not None
    work = [sum(s.end - s.start for s in row) for row in apart.rows]
    copied = [sum(s.end - s.start for s in row) for row in together.rows]
    assert [b - a for a, b in zip(work, copied, strict=True)] == pytest.approx([2 * 8 * 0.1] * 2)


def test_ranks_of_two_hosts_copy_nothing_into_shared_memory() -> None:
    program = programs(rows=16).program(Layout.parse("pipe=2 data=8 micro=2"))
    machine = replace(second_a_matmul("16 x h100"), shares_memory=True)
    seconds = [estimate(program, replace(machine, value_start=x)).seconds for x in (0.0, 0.1)]
    assert seconds[0] == seconds[1]


def test_micro_batches_repeat_their_part() -> None:
    one, four = estimated("", rows=8), estimated("micro=4", rows=8)
    assert four.seconds == pytest.approx(4 * one.seconds)


def accumulating(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    total: Any = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = nn.functional.mse_loss(model(a), b) / 4
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def test_a_sum_may_begin_before_a_loop_and_end_after_it() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.RMSprop(model.parameters())
    job = Job.of(accumulating, model, optimizer, Layout())
    batch = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
    made = CandidatePrograms(job, batch, on_processors=False)
    program = made.program(Layout.parse("tensor=4 micro=16"))
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    assert estimate(program, machine).kinds[COLLECTIVES] > 0


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.qkv(self.words(tokens))
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in x.chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_the_operations_of_a_model_are_those_of_the_papers() -> None:
    """6 a weight of a matmul for each token, and 12 x width x tokens of attention: PaLM's appendix B."""
    model = _Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job.of(train_step, model, optimizer, Layout())
    made = CandidatePrograms(job, (torch.randint(0, 32, (2, 10)),), on_processors=False)
    nodes = list(made.captured("fp32").graph.nodes)
    assert any("attention" in str(n.target) and "backward" in str(n.target) for n in nodes)
    assert flops_of_nodes(nodes) == pytest.approx(20 * (6 * (16 * 48 + 16 * 16) + 12 * 16 * 10))


def test_slower_links_take_longer() -> None:
    near = estimated("data=8 zero=3", "8 x h100", rows=16)
    far = estimated("data=8 zero=3", "8 x rtx-4090", rows=16)
    assert far.seconds > near.seconds
    assert far.nbytes == near.nbytes


def test_ranks_that_share_a_processor_take_turns() -> None:
    """Side by side they all wait; in a pipeline one works in the bubble of another."""
    for layout, expected in (("data=2", 2.0), ("pipe=2 micro=2", None)):
        program = programs().program(Layout.parse(layout))
        machine = second_a_matmul("2 x h100")
        alone = estimate(program, machine)
        shared = estimate(program, replace(machine, ranks_per_processor=2.0))
        assert shared.peak_nbytes == alone.peak_nbytes
        assert shared.kinds[SHARED] == pytest.approx(shared.seconds - alone.seconds)
        if expected is not None:
            assert shared.seconds == pytest.approx(expected * alone.seconds)
        else:
            # One after the other: the work of both ranks, of two micro-batches of 11 matmuls.
            assert shared.seconds == pytest.approx(22, rel=0.01)
            assert alone.seconds < shared.seconds < 2 * alone.seconds


def test_bytes_between_hosts_are_those_behind_the_sums_of_a_host() -> None:
    """4 weights of 64 x 64 in float32, and a loss: 3 of 4 hosts of 4 ranks, each rank with a quarter."""
    cluster = Cluster.parse("16 x h100")
    small = replace(
        cluster, topology=replace(cluster.topology, devices_per_host=Figure(4, "of this test"))
    )
    program = programs(rows=16).program(Layout.parse("data=16"))
    sent = estimate(program, replace(second_a_matmul("16 x h100"), cluster=small)).nbytes
    whole = 4 * WIDTH * WIDTH * 4
    assert sent["inside"] == pytest.approx(2 * 3 / 4 * whole, rel=1e-3)
    assert sent["between"] == pytest.approx(2 * 3 / 4 * whole / 4, rel=1e-3)


class Layers(nn.Module):
    """Four of them; `tied`: the first and the last have one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_rank_sends_messages_and_tied_weights(tied: bool) -> None:
    model = Layers(tied=tied)
    job = Job.of(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), Layout())
    made = CandidatePrograms(job, (torch.randn(8, WIDTH),)).program(Layout.parse("pipe=2 micro=4"))
    loss = 4
    message, weight = 8 * WIDTH * 4, WIDTH * WIDTH * 4 if tied else 0
    assert estimate(made, second_a_matmul("8 x h100")).nbytes == {"inside": message + weight + loss}
