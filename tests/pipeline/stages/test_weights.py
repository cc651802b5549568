"""Weights that ranks keep in parts are gathered, and gradients reduced, where the schedule says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import stacks
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import GATHER, REDUCE, Body
from tutti.layout import Layout
from tutti.pipeline.micro_batches.moments import MICRO
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.verification.verdict import Subject

SCATTER = collectives.reduce_scatter


def made(layout: str, name: str = "stack", cut: Sequence[str] = ()) -> Timed:
    return in_time(stacks.subject(name).program(Layout.parse(layout)), cut_at=cut)


def over_ranks(graph: fx.Graph, *targets: object) -> list[fx.Node]:
    """The collectives of a graph that are between ranks."""
    found = [n for n in graph.nodes if n.target in targets]
    return [n for n in found if collectives.axes_of(n) != (MICRO,)]


@cache
def wide() -> Subject:
    """Four layers with weights that are worth scattering."""
    layers = [nn.Linear(96, 96, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    return Subject(wide_step, model, optimizer, (torch.randn(8, 96),))


def wide_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def words(body: Body) -> list[str]:
    return [str(do) for do in body.row if not do.way]


def test_a_stage_gathers_its_weights_before_it_begins_and_reduces_at_its_end() -> None:
    """Of two stages each gathers right before its first forward, reduces after its last backward."""
    cut = [f"layers.{i}" for i in (1, 2, 3)]  # each stage has a layer
    timed = made("pipe=2 data=2 zero=3 micro=2 schedule=interleaved", cut=cut)
    for pipe_rank, body in enumerate(timed.bodies):
        row = words(body)
        for stage in (pipe_rank, pipe_rank + 2):
            own = [word for word in row if word.startswith(str(stage))]
            assert (own[0], own[-1]) == (f"{stage}G", f"{stage}A")
            assert sorted(own[1:-1]) == [f"{stage}{word}" for word in ("B0", "B1", "F0", "F1")]
            assert row[row.index(f"{stage}G") + 1] == f"{stage}F0"
            assert row[row.index(f"{stage}A") - 1] == f"{stage}B1"


def test_weights_are_gathered_once_for_forward_and_backward() -> None:
    for program, body in zip(*_places(made("pipe=2 data=2 zero=3 micro=2")), strict=True):
        (gathers,) = [p for (_, kind), p in body.parts.items() if kind == GATHER]
        state = {n.meta["name"] for n in gathers.graph.nodes if n.op == "placeholder"}
        assert len(over_ranks(gathers.graph, collectives.all_gather)) == len(state) >= stacks.DEPTH
        assert not over_ranks(program, collectives.all_gather)


def _places(timed: Timed) -> tuple[list[fx.Graph], list[Body]]:
    return [one.graph for one in timed.programs], timed.bodies


def test_without_stages_every_micro_batch_gathers_what_it_needs() -> None:
    timed = made("data=2 zero=3 micro=2")
    (body,) = timed.bodies
    assert words(body) == [f"0B{k}" for k in range(2)]
    graph = body.parts[0, "B"].graph
    gathers = over_ranks(graph, collectives.all_gather)
    order = list(graph.nodes)
    # Each right before it is used, so that few are held at once.
    assert len(gathers) > 8
    assert all(order.index(next(iter(n.users))) - order.index(n) < 8 for n in gathers)
    assert not over_ranks(timed.programs[0].graph, collectives.all_gather)


@pytest.mark.parametrize("pipe", ["", "pipe=2 "])
def test_gradients_are_added_up_whole_or_in_parts(pipe: str) -> None:
    """Of large weights, whose gradients are scattered: as a total, or in every micro-batch."""
    subject = wide()
    for zero in (1, 2):
        layout = Layout.parse(f"{pipe}data=2 zero={zero} micro=2")
        timed = in_time(subject.program(layout))
        parts = [
            (kind, part.graph) for body in timed.bodies for (_, kind), part in body.parts.items()
        ]
        in_each = sum(len(over_ranks(g, SCATTER)) for kind, g in parts if kind == "B")
        once = sum(len(over_ranks(g, SCATTER)) for kind, g in parts if kind == REDUCE)
        once += sum(len(over_ranks(one.graph, SCATTER)) for one in timed.programs)
        assert (once, in_each) == ((4, 0) if zero == 1 else (0, 4))
        assert subject.verdict(layout).max_error < 1e-12


def test_a_tied_weight_of_sharded_gradients_crosses_once_a_step() -> None:
    timed = made("pipe=2 data=2 zero=2 micro=2", "thrice")
    sums = [s.name for body in timed.bodies for s in body.sums]
    sent = {n for body in timed.bodies for names in body.messages.values() for n in names}
    assert len(sums) > 2 * stacks.DEPTH and all("reduce_scatter" not in n for n in sent)


def test_a_file_says_when_weights_are_dropped_and_gathered_again(tmp_path: Path) -> None:
    file = tmp_path / "again.txt"
    file.write_text("0G 0F0 0F1 0G 0B0 0B1\n1G 1F0 1B0 1F1 1B1\n")
    layout = f"pipe=2 data=2 zero=3 micro=2 schedule={file}"
    timed = made(layout)
    assert words(timed.bodies[0]) == ["0G", "0F0", "0F1", "0G", "0B0", "0B1", "0A"]
    assert words(timed.bodies[1]) == ["1G", "1F0", "1B0", "1F1", "1B1", "1A"]
    body = timed.bodies[0]
    kept, dropped = body.gathered[0], set[str]()
    for do, dying in zip(body.row, body.last_reads, strict=True):
        if do.kind == GATHER:
            assert not dropped or dropped == kept_by(body, "F")
            dropped.clear()
        dropped |= dying & kept
    assert dropped == kept_by(body, "B")
    found = stacks.verdict("stack", layout)
    assert found.ok and found.max_error < 1e-12


def kept_by(body: Body, kind: str) -> set[str]:
    """What a part reads of the gathered weights."""
    return set(body.parts[0, kind].inputs) & body.gathered[0]
