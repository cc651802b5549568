"""The time of random numbers on a device known by its data: the kernels of a draw, counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import trained
from tutti.costs.draw_seconds import draw_seconds, kernel_nbytes
from tutti.costs.kernel_seconds import LAUNCHES
from tutti.graph.analysis.draws import is_draw
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms

KINDS = {
    "bernoulli": ((0.9,), torch.bool),
    "uniform": ((0.0, 1.0), torch.float32),
    "normal": ((0.0, 1.0), torch.float32),
    "randint": ((0.0, 5.0), torch.int64),
    "permutation": ((), torch.int64),
}


def test_a_mask_is_three_kernels() -> None:
    """Keys of rows; their hash with the columns; a comparison."""
    rows, cols = 256, 1024
    n = rows * cols
    moved = kernel_nbytes("bernoulli", (rows, cols), (0.9,), torch.bool)
    assert moved == (8 * rows, 4 * (rows + cols + n), 5 * n)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_counted_without_memory(kind: str) -> None:
    params, dtype = KINDS[kind]
    shape = (64,) if kind == "permutation" else (64, 2**16)
    moved = kernel_nbytes(kind, shape, params, dtype)
    assert 3 <= len(moved) < 20 and all(moved)


@trained
def step(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(model(x), 0.1).square().mean()


def test_a_step_takes_longer_by_its_draws() -> None:
    model = nn.Linear(1024, 1024)
    job = Job.of(step, model, torch.optim.SGD(model.parameters(), lr=0.1), Layout())
    programs = CandidatePrograms(job, (torch.zeros(512, 1024),))
    cluster = Cluster.parse("2 x h100")
    for layout in ("", "data=2"):
        graph = programs.program(Layout.parse(layout)).graph
        (drawn,) = [node for node in graph.nodes if is_draw(node)]
        with_draws, without = (
            PricedMachine.of(cluster, draws=d).kernels(graph).seconds for d in (True, False)
        )
        ((seconds, limit),) = draw_seconds(graph, cluster.device).values()
        assert with_draws == {**without, drawn: seconds}
        assert limit == LAUNCHES  # 512 x 1024 numbers are few bytes
        assert drawn not in without
        assert with_draws[drawn] >= 3 * cluster.device.host_seconds.value  # each waits for the host
