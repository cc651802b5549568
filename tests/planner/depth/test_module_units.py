"""Models whose layers do not repeat, composed of modules, against the whole program of the same layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import trained
from tutti.capture.step import capture
from tutti.errors import ShardingError
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.depth.module_units import ModuleUnits
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.search.ranking import NUM_REFINED, ranked
from tutti.planning.step_estimates import StepEstimates

CHANNELS, SIZE, ROWS = 256, 64, 64


class Block(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, into), nn.Conv2d(into, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.conv(F.silu(self.norm(x)))


class UNet(nn.Module):
    """Half of the resolution and back, with values that skip the middle."""

    def __init__(self, width: int = CHANNELS) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.down = nn.ModuleList([Block(width, width), Block(width, 2 * width)])
        self.middle = Block(2 * width, 2 * width)
        self.up = nn.ModuleList([Block(4 * width, width), Block(2 * width, width)])
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](self.begin(x) * self.scale)
        second = self.down[1](F.avg_pool2d(first, 2))
        x = torch.cat([self.middle(second), second], 1)
        x = F.interpolate(self.up[0](x), scale_factor=2.0)
        return self.end(self.up[1](torch.cat([x, first], 1)))


train_step: Callable[..., Any] = trained(lambda model, x: F.mse_loss(model(x), x))


def estimates_of(model: nn.Module, batch: Tensor, num_layouts: int) -> StepEstimates:
    job = Job.of(train_step, model, torch.optim.AdamW(model.parameters()), Layout())
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    return StepEstimates(job, (batch,), lambda _: machine, num_layouts=num_layouts)


def whole() -> nn.Module:
    with torch.device("meta"):
        return UNet()


@pytest.fixture(scope="module")
def near() -> StepEstimates:
    return estimates_of(whole(), torch.zeros(ROWS, 3, SIZE, SIZE), 100_000)


@pytest.fixture(scope="module")
def exact() -> StepEstimates:
    return estimates_of(whole(), torch.zeros(ROWS, 3, SIZE, SIZE), 1)


def test_units_are_modules_in_the_order_of_the_forward() -> None:
    model = UNet(16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = capture(train_step, model, optimizer, (torch.zeros(2, 3, 8, 8),)).graph
    units = ModuleUnits(graph.nodes)
    own = [units.of(name) for name, _ in model.named_modules()]
    names = ["begin", "down.0", "down.1", "middle", "up.0", "up.1", "end"]
    firsts = [
        min(
            u[0]
            for n, u in zip(dict(model.named_modules()), own, strict=True)
            if u is not None and (n == name or n.startswith(f"{name}."))
        )
        for name in names
    ]
    assert firsts == sorted(set(firsts))
    assert units.of("") is units.of("down") is units.of("scale") is None
    assert units.of("down.1.conv.weight") == units.of("down.1.conv") is not None
    assert len(units.runs) > len(names)  # blocks are larger than a share of the operations


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "data=8",
        "data=8 zero=3",
        "data=4 zero=1 micro=2",
        "data=4 remat=full",
        "data=2 tensor=2",
        "pipe=2 micro=4",
        "data=2 pipe=4 micro=8",
    ],
)
def test_time_and_memory_are_near_those_of_the_whole_program(
    layout: str, near: StepEstimates, exact: StepEstimates
) -> None:
    assert near.composes_modules
    assert not exact.composes_modules
    one, other = near(Layout.parse(layout)), exact(Layout.parse(layout))
    assert one.seconds == pytest.approx(other.seconds, rel=0.25)
    assert 0.5 < one.peak_nbytes / other.peak_nbytes < 2


def test_all_state_and_work_belongs_to_a_piece(near: StepEstimates, exact: StepEstimates) -> None:
    blocks = near.blocks(Layout())
    pieces = [blocks.first, *blocks.sequence(), blocks.last]
    parameters = sum(p.nbytes for p in near.job.model.parameters())
    assert sum(p.parameters for p in pieces) == parameters
    assert sum(p.gradients for p in pieces) == parameters
    (inner,) = blocks.layers[len(blocks.layers) // 2][0]
    assert inner.forward > 0
    assert inner.backward > inner.forward
    assert near.flops() == exact.flops()


def test_messages_hold_the_values_that_skip_the_middle(near: StepEstimates) -> None:
    blocks = near.blocks(Layout())
    assert len(blocks.messages) == len(blocks.layers) + 1
    units = near._units_in("fp32")
    middle = units.of("middle.conv") or units.of("middle")
    assert middle is not None
    first = 4 * ROWS * CHANNELS * SIZE * SIZE  # of down.0; the value of down.1 has half of it
    assert blocks.messages[middle[0] + 1] >= first + first / 2


def test_the_first_layouts_have_estimates_of_their_programs(
    near: StepEstimates, exact: StepEstimates
) -> None:
    layouts = [
        Layout.parse(x) for x in ("data=8", "data=4 micro=2", "data=8 zero=3", "pipe=2 micro=4")
    ]
    ranking = ranked(layouts, near, float("inf"), refined=near.refinement)
    assert len(layouts) <= NUM_REFINED
    for row in ranking.rows:
        own = exact(row.estimate.layout)
        assert (row.estimate.seconds, row.estimate.peak_nbytes) == (own.seconds, own.peak_nbytes)


def test_a_refusal_in_another_process_leaves_the_table(
    near: StepEstimates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = StepEstimates._estimate

    def refuses(self: StepEstimates, layout: Layout, *, refined: bool, **words: Any) -> Any:
        if refined and "tensor" in layout.axes:
            raise ShardingError("no tensor")
        return own(self, layout, refined=refined, **words)

    monkeypatch.setattr(StepEstimates, "_estimate", refuses)
    layouts = [Layout.parse(x) for x in ("data=8", "data=4 tensor=2", "data=2 tensor=4")]
    ranking = ranked(layouts, near, float("inf"), refined=near.refinement)
    assert [row.layout for row in ranking.rows] == ["data=8"]
    assert {layout for layout, _ in ranking.refused} == {"data=4 tensor=2", "data=2 tensor=4"}
    assert not near._ahead


def test_a_layout_that_its_program_refuses_leaves_the_table(near: StepEstimates) -> None:
    refinement = near.refinement
    assert refinement is not None

    def refuses(layout: Layout) -> Any:
        if layout.micro > 1:
            raise ShardingError("no micro-batches")
        return refinement.of(layout)

    layouts = [Layout.parse("data=8"), Layout.parse("data=4 micro=2")]
    changed = replace(refinement, of=refuses)
    ranking = ranked(layouts, near, float("inf"), refined=changed)
    assert [row.layout for row in ranking.rows] == ["data=8"]
    assert ranking.refused == (("data=4 micro=2", "no micro-batches"),)


def test_a_budget_in_bytes_has_an_estimate(near: StepEstimates, exact: StepEstimates) -> None:
    layout = Layout.parse("data=4 remat=2GB")
    assert near(layout).seconds == exact(layout).seconds
