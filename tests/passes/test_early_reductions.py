"""`early_reductions`: the last micro-batch reduces the sums, the same values, on one link or none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stacks
from ranks import Ranks
from runs import train
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import REDUCE, Body, loop
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.passes import early_reductions as module
from tutti.passes.early_reductions import early_reductions
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.verification.verdict import Subject
from ways import GLOO, TWO_LEVELS, by

STEPS = 3
REDUCTIONS = ("all_reduce", "reduce_scatter")


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), norm


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    layers = (part for _ in range(4) for part in (nn.Linear(128, 128), nn.Tanh()))
    model = nn.Sequential(*layers).double()
    return Subject(
        train_step, model, torch.optim.AdamW(model.parameters()), (torch.randn(32, 128).double(),)
    )


def finals(program: Program, *without: str, near: bool = False) -> list[fx.Graph]:
    shared = frozenset({("data",)}) if near else frozenset[tuple[str, ...]]()
    programs = in_time(program).programs
    return [
        optimized(one, Target(frozenset(one.captured.updated), shared), without=without)
        for one in programs
    ]


def bodies(graphs: list[fx.Graph]) -> list[Body]:
    found: list[Any] = [n.args[0] for g in graphs for n in g.nodes if n.target is loop]
    return [body for body in found if any(kind != "F" for _, kind in body.parts)]


def reduced(graph: fx.Graph) -> Counter[str]:
    """The tensors that a graph reduces over ranks, by the kind of the collective."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target in (collectives.together, collectives.together_, collectives.start):
            found[str(node.args[0])] += len(node.args[1])  # type: ignore[arg-type]
        elif node.target in collectives.COLLECTIVES:
            found[node.target.__name__] += 1  # type: ignore[union-attr]
    return Counter({kind: found[kind] for kind in REDUCTIONS if found[kind]})


@pytest.mark.parametrize("layout", ["data=2 micro=4", "data=2 zero=1 micro=4"])
def test_the_last_micro_batch_reduces_what_was_behind_the_loop(
    subject: Subject, layout: str
) -> None:
    program = subject.program(Layout.parse(layout))
    (before,), (after,) = finals(program, "early_reductions"), finals(program)
    ((old,), (new,)) = bodies([before]), bodies([after])
    assert old.last == {} and set(new.last) == {(0, "B")}
    assert new.row == old.row
    (last,) = new.last.values()
    assert last.totals == old.parts[0, "B"].summed  # all of them: eight gradients, and the loss
    behind, moved = reduced(before), reduced(last.graph)
    assert sum(moved.values()) == len(last.totals) == 9
    assert reduced(after) + moved == behind
    assert not reduced(new.parts[0, "B"].graph)


def test_reductions_begin_beside_the_backward(subject: Subject) -> None:
    """With buckets of few gradients: the first begins before the last matmul, and ends before the next."""
    program = subject.program(Layout.parse("data=2 zero=1 micro=4"))
    (body,) = bodies(finals(program, "bucket"))
    (last,) = body.last.values()
    names = [n.target for n in last.graph.nodes]
    matmuls = [i for i, t in enumerate(names) if t is torch.ops.aten.addmm_.default]
    starts = [i for i, t in enumerate(names) if t is collectives.start]
    ends = [i for i, t in enumerate(names) if t is collectives.finish]
    assert len(matmuls) == 4 and starts[0] < matmuls[1] and len(starts) == len(ends) > 4
    assert all(end < later for end, later in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("layout", ["data=2 zero=2 micro=4", "data=2 zero=3 micro=4", "micro=4"])
def test_nothing_is_left_to_the_last_micro_batch(subject: Subject, layout: str) -> None:
    """Each one reduces its own gradients, or there is nothing to reduce."""
    (body,) = bodies(finals(subject.program(Layout.parse(layout))))
    assert body.last == {}


def test_ranks_that_share_memory_reduce_behind_the_loop(subject: Subject) -> None:
    (body,) = bodies(finals(subject.program(Layout.parse("data=2 micro=4")), near=True))
    assert body.last == {}


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_reduces_in_its_last_backward(subject: Subject, schedule: str) -> None:
    program = subject.program(Layout.parse(f"data=2 pipe=2 micro=4 zero=1 schedule={schedule}"))
    old, new = bodies(finals(program, "early_reductions")), bodies(finals(program))
    for before, after in zip(old, new, strict=True):
        assert any(do.kind == REDUCE for do in before.row)
        assert [do for do in before.row if do.kind != REDUCE] == list(after.row)
        stages = {stage for stage, kind in before.parts if kind == REDUCE}
        assert {stage for stage, _ in after.last} == stages
        for (stage, _), last in after.last.items():
            assert reduced(last.graph) == reduced(before.parts[stage, REDUCE].graph)


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 micro=4",
        "data=2 zero=1 micro=4 remat=full",
        "data=2 tensor=2 micro=2 zero=1",
        "data=2 pipe=2",
        "data=2 pipe=2 zero=1",
        *(f"data=2 pipe=2 micro=4 zero=1 schedule={name}" for name in SCHEDULES),
        "data=2 pipe=2 micro=4 zero=3 schedule=interleaved",
    ],
)
@pytest.mark.parametrize("name", ["thrice", "telling", "summed", "common", "decay"])
def test_the_same_step(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, maxima and joined results over micro-batches, and weights of several stages."""
    monkeypatch.setattr(module, "SMALL_NBYTES", 0)
    monkeypatch.setenv("TUTTI_SHARED_MEMORY", "off")
    found = stacks.verdict(name, layout)
    assert found.ok, str(found)


def test_a_part_with_one_micro_batch_adds_to_nothing(subject: Subject) -> None:
    program = subject.program(Layout.parse("data=2 pipe=2 zero=1"))
    for body in bodies(finals(program)):
        for key, last in body.last.items():
            assert last.reduced and not set(last.totals) & set(body.parts[key].summed)


def test_what_the_pass_counts(subject: Subject) -> None:
    (one,) = in_time(subject.program(Layout.parse("data=2 micro=4"))).programs
    assert early_reductions(one.graph, Target()) == 9
    assert early_reductions(one.graph, Target(shared=frozenset({("data",)}))) == 0


def _on_rank(way: str, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch, by(way):
        patch.setattr(module, "SMALL_NBYTES", 0)
        return train("gpt", layout, STEPS)


@pytest.mark.parametrize(
    ("way", "layout", "n"),
    [
        (GLOO, "data=2 micro=2", 2),
        (GLOO, "data=2 zero=1 micro=2 remat=full", 2),
        (GLOO, "data=2 pipe=2 micro=4 schedule=interleaved", 4),
        (GLOO, "data=2 pipe=2 zero=1 micro=4 schedule=zb", 4),
        (TWO_LEVELS, "data=4 micro=2", 4),
    ],
)
def test_real_ranks_train_as_one_device(ranks: Ranks, way: str, layout: str, n: int) -> None:
    one = ranks.after(train, "gpt", "", STEPS)
    losses, state = one.result
    held = set[str]()
    for found, own in one.run(_on_rank, way, layout, n=n):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, x in own.items():  # of its pipeline rank
            torch.testing.assert_close(x, state[name], rtol=1e-5, atol=1e-7)
        held |= own.keys()
    assert held == state.keys()
