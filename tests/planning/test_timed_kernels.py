"""The kernels of programs run on random values: every kind of program, and no collective."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mixtures import arguments
from tutti.graph.analysis.aliases import viewed
from tutti.graph.analysis.draws import is_draw
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import graphs_of, loop
from tutti.graph.randomness.draw import draw
from tutti.job import Job
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.timed_kernels import TimedKernels, _drawing, seconds_by_op

_TURN = 0.05  # seconds


def _others_turn(x: Tensor) -> Tensor:
    """An op that leaves its processor, as one does when other work has its turn there."""
    time.sleep(_TURN)
    return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))))


def train_step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@pytest.fixture(scope="module")
def programs() -> CandidatePrograms:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job.of(train_step, model, optimizer, Layout())
    return CandidatePrograms(job, (torch.zeros(4, 6, dtype=torch.long),))


def graphs(program: Program) -> list[fx.Graph]:
    """The final graphs of all pipeline ranks, in memory that the ranks share."""
    shared = frozenset(collectives.axes_of(n) for n in program.collectives)
    target = Target(donated=frozenset(program.captured.updated), shared=shared)
    made = in_time(program).programs if program.layout.in_time else [program]
    return [one for p in made for one in graphs_of(optimized(p, target))]


@pytest.mark.parametrize(
    "layout", ["", "data=2", "data=2 zero=3", "micro=2", "pipe=2 micro=2", "data=2 remat=full"]
)
def test_every_op_of_every_program_runs(layout: str, programs: CandidatePrograms) -> None:
    timed, draws = TimedKernels(1, 1), 0
    for graph in graphs(programs.program(Layout.parse(layout))):
        found = timed(graph)
        for node in graph.nodes:
            moves = node.target in (*collectives.PLAYED, loop) and not is_draw(node)
            assert (node in found) == (node.op == "call_function" and not moves)
            draws += is_draw(node)
        assert all(seconds >= 0 for seconds in found.values())
    assert draws  # of dropout


@pytest.mark.parametrize(
    ("kind", "params", "dtype"),
    [
        ("bernoulli", [0.9], torch.bool),
        ("bernoulli", [0.9], torch.bfloat16),
        ("uniform", [0.0, 2.0], torch.float64),
        ("normal", [0.0, 1.0], torch.float32),
        ("randint", [0.0, 5.0], torch.int64),
        ("permutation", [], torch.int64),
    ],
)
def test_every_kind_of_random_numbers_is_drawn(
    kind: str, params: list[float], dtype: torch.dtype
) -> None:
    shape = [6] if kind == "permutation" else [6, 4]
    graph = fx.Graph()
    made = graph.call_function(draw, (kind, shape, params, dtype, torch.device("cpu"), 0))
    made.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    graph.output(made)
    values = _drawing(made)(*made.args)
    assert (list(values.shape), values.dtype) == (shape, dtype)
    assert TimedKernels(1, 1)(graph)[made] > 0


def test_a_larger_matmul_takes_longer() -> None:
    graph = fx.Graph()
    for size in (16, 1024):
        x = graph.placeholder(f"x{size}")
        x.meta["val"] = torch.empty(size, size, device="meta")
        made = graph.call_function(torch.ops.aten.mm.default, (x, x))
        made.meta["val"] = x.meta["val"]
    graph.output(made)
    small, large = (s for n, s in TimedKernels(1, 1)(graph).items())
    assert large > small


def test_other_processes_end_with_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, device="meta")
    made = graph.call_function(torch.ops.aten.neg.default, (x,))
    made.meta["val"] = x.meta["val"]
    graph.output(made)
    forked, fork = list[int](), os.fork

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", noted)
    found = TimedKernels(3, 1)(graph)
    assert seconds_by_op(found).keys() == {"neg.default"}
    assert len(forked) == 2
    for child in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_views_are_ops_too(programs: CandidatePrograms) -> None:
    (graph,) = graphs(programs.program(Layout()))
    views = [n for n in graph.nodes if n.op == "call_function" and viewed(n) is not None]
    assert views
    assert set(views) <= TimedKernels(1, 1)(graph).keys()


def test_a_wait_for_the_processor_does_not_count() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(8)
    turn = graph.call_function(_others_turn, (x,))
    turn.meta["val"] = torch.ones(8)
    graph.output(turn)
    assert TimedKernels(1, 1)(graph)[turn] < 0.5 * _TURN


@pytest.mark.parametrize("layout", ["expert=2", "expert=4", "data=2 expert=2 zero=3"])
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
def test_every_op_of_a_mixture_runs(name: str, layout: str) -> None:
    """Random values send rows to other experts than the ranks would have agreed on."""
    step, model, optimizer, batch = arguments(name)
    made = CandidatePrograms(Job.of(step, model, optimizer, Layout()), batch)
    for graph in graphs(made.program(Layout.parse(layout))):
        assert all(seconds >= 0 for seconds in TimedKernels(1, 1)(graph).values())
