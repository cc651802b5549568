"""The pieces of a step: each reads what is there, and nothing crosses that need not."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import cache
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import nn

import stacks
import subjects
import tutti
from small_steps import trained
from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import GATHER, RECEIVE, REDUCE, SEND, WHOLE, Body, loop
from tutti.job import Job
from tutti.layout import Layout
from tutti.pipeline.ranks import pipe_ranks
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.verification.verdict import Subject

LAYOUTS = ("pipe=4 micro=7 schedule=zb", "pipe=2 micro=4 schedule=zbv", "pipe=3")
NAMES = ("thrice", "telling", "summed", "penalty")


def cut(name: str, layout: str) -> Timed:
    return in_time(stacks.subject(name).program(Layout.parse(layout)))


class Names:
    """Plays bodies with names in place of values; who reads what is not there, fails."""

    def __init__(self, bodies: list[Body]) -> None:
        self.bodies = bodies
        self.live: list[Any] = [defaultdict(set) for _ in bodies]
        self.wires: defaultdict[tuple[int, int], deque[tuple[str, ...]]] = defaultdict(deque)
        self.added: Counter[str] = Counter()
        self.reduced: Counter[str] = Counter()

    def play(self) -> None:
        at, rows = [0] * len(self.bodies), [body.row for body in self.bodies]
        while True:
            moved = False
            for pipe_rank, row in enumerate(rows):
                while at[pipe_rank] < len(row) and self._step(pipe_rank, row[at[pipe_rank]]):
                    at[pipe_rank] += 1
                    moved = True
            if not moved:
                break
        assert at == [len(row) for row in rows]
        assert not any(self.wires.values()), "something was sent that nobody took"

    def _step(self, pipe_rank: int, do: Any) -> bool:
        body, live = self.bodies[pipe_rank], self.live[pipe_rank]
        if do.way == RECEIVE:
            wire = self.wires[do.other, do.stage]
            if not wire:
                return False
            assert wire[0] == body.messages[do.other, do.kind, do.stage]
            live[do.stage, do.micro] |= set(wire.popleft())
        elif do.way == SEND:
            names = body.messages[do.stage, do.kind, do.other]
            assert set(names) <= live[do.stage, do.micro], do
            self.wires[do.stage, do.other].append(names)
        elif do.kind == REDUCE:
            part = body.parts[do.stage, do.kind]
            assert all(self.added[n] == body.num_micro for n in part.inputs), do
            self.reduced.update(part.inputs)
        else:
            part = body.parts[do.stage, do.kind]
            here = live[do.stage, do.micro] | live[do.stage, WHOLE]
            assert set(part.inputs) <= here | set(body.given), do
            live[do.stage, WHOLE if do.kind == GATHER else do.micro] |= set(part.outputs)
            for other, names in body.near[do.stage, do.kind]:
                live[other, do.micro] |= set(names)
            self.added.update(part.summed)
        return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_part_reads_what_is_there(name: str, layout: str) -> None:
    made = cut(name, layout)
    names = Names(made.bodies)
    names.play()
    assert names.added and set(names.added.values()) == {Layout.parse(layout).micro}
    assert set(names.added) == {s.name for body in made.bodies for s in body.sums}


@pytest.mark.parametrize("name", ["gpt_tied", "t5", "unet"])
def test_every_part_of_a_model_reads_what_is_there(name: str) -> None:
    made = in_time(subjects.program(name, "pipe=4 micro=4 schedule=zb"))
    names = Names(made.bodies)
    names.play()
    assert set(names.added.values()) == {4}


def test_input_gradients_are_only_what_others_wait_for() -> None:
    made = cut("stack", "pipe=2 micro=4 schedule=zb")
    messages = {k: v for body in made.bodies for k, v in body.messages.items()}
    sent = {n for (_, kind, _), names in messages.items() if kind == "I" for n in names}
    assert sent and not any(kind == "W" for _, kind, _ in messages)
    for body in made.bodies:
        for (_, kind), part in body.parts.items():
            if kind == "I":
                needed = {n for n in part.graph.nodes if n.name in sent}
                for node in reversed(part.graph.nodes):
                    if any(u in needed for u in node.users):
                        needed.add(node)
                calls = [n for n in part.graph.nodes if n.op == "call_function"]
                assert all(n in needed for n in calls)
    # The first stage has no one to send to: all of its backward is W.
    assert not made.bodies[0].parts[0, "I"].outputs and not made.bodies[0].parts[0, "I"].summed


def test_weight_gradients_are_in_the_other_half() -> None:
    made = cut("stack", "pipe=4 micro=4 schedule=zb")
    for body in made.bodies:
        for (_, kind), part in body.parts.items():
            assert kind == "W" or len(part.summed) <= 1  # the loss


@pytest.mark.parametrize(
    ("name", "layout"), [("stack", "pipe=2 micro=4"), ("unet", "pipe=4 micro=4")]
)
def test_bytes_sent_for_a_micro_batch_are_those_that_cross(name: str, layout: str) -> None:
    """By hand: every forward value that a later stage's forward reads, once for each such stage."""
    made = cut(name, layout) if name in stacks.STACKS else in_time(subjects.program(name, layout))
    stages = made.stages
    expected = 0
    for node in stages.forward:
        mine = stages.stage[node]
        others = {stages.stage[u] for u in node.users if u in stages.forward} - {mine}
        expected += len(others) * nbytes_of(node)
    messages = {k: (v, body) for body in made.bodies for k, v in body.messages.items()}
    sent = sum(
        body.vals[n].nbytes
        for (_, kind, _), (names, body) in messages.items()
        for n in names
        if kind == "F"
    )
    forward = {n.name for n in stages.forward}
    late = sum(  # saved by the forward, read by the backward of a later stage alone
        body.vals[n].nbytes
        for (_, kind, to), (names, body) in messages.items()
        for n in names
        if kind == "F"
        and to not in {stages.stage[u] for u in _node(made, n).users if u.name in forward}
    )
    assert sent - late == expected > 0


def _node(made: Timed, name: str) -> Any:
    return next(n for n in made.stages.forward if n.name == name)


def test_what_is_recomputed_is_computed_where_it_was_at_first() -> None:
    """Segments of `remat` need not end where stages do; nothing of another stage is recomputed."""
    for layout in ("pipe=3 micro=4 remat=full", "pipe=3 micro=4"):
        made = in_time(deep().program(Layout.parse(layout)))
        stage = {n.name: s for n, s in made.stages.stage.items()}
        again = [n for n in made.stages.stage if RECOMPUTED in n.meta]
        assert bool(again) == ("remat" in layout)
        for node in again:
            assert stage[node.name] == stage.get(node.meta[RECOMPUTED], stage[node.name])
        for program in made.programs:  # no weight goes to another pipeline rank to be read there
            before = takewhile(lambda n: n.target is not loop, program.graph.nodes)
            assert all(n.target is not collectives.send for n in before)


@cache
def deep() -> Subject:
    """Eight residual layers, each wide inside, which three stages do not divide."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(deep_step, model, optimizer, (torch.randn(8, 16),))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x


def deep_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def test_a_shared_weight_crosses_once_a_step_and_never_with_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipe_ranks, "SMALL", stacks.DIM)  # a few numbers go everywhere instead
    made = cut("thrice", "pipe=2 micro=4")
    shape = (stacks.DIM, stacks.DIM)
    assert not any(tuple(v.shape) == shape for body in made.bodies for v in body.vals.values())
    before, after = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for program in made.programs:
        found = before
        for node in program.graph.nodes:
            if node.target is loop and len(node.args[0].parts) > 1:  # type: ignore[union-attr]
                found = after
            if node.target is collectives.send:
                xs, source, to = node.args
                large = [x for x in xs if tuple(x.meta["val"].shape) == shape]  # type: ignore[union-attr]
                found.update({(source, to): len(large)} if large else {})
    # The weight goes to the pipeline rank that reads it again, and its gradient comes back.
    assert before == {(0, 1): 1} and after == {(1, 0): 1}


def test_what_is_kept_or_only_looked_at_is_not_added_to() -> None:
    """What is summed and read again by another part is copied first."""
    made = cut("summed", "pipe=2 micro=7 schedule=gpipe")
    kept = [
        (part, n)
        for body in made.bodies
        for part in body.parts.values()
        for n in _summed(part)
        if n in _outputs(part)
    ]
    assert not kept


def _summed(part: Any) -> list[Any]:
    return next(n for n in reversed(part.graph.nodes) if n.op == "output").args[0][1]


def _outputs(part: Any) -> list[Any]:
    return next(n for n in reversed(part.graph.nodes) if n.op == "output").args[0][0]


class Scaled(nn.Module):
    """Norms without weights, scaled by hand: the weights' gradients read a result of a recomputed norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(8) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, up, down in zip(self.scales, self.up, self.down, strict=True):
            x = x + down(nn.functional.glu(up(nn.functional.layer_norm(x, (8,)) * scale)))
            x = x + down(nn.functional.layer_norm(x, (8,)) * scale)
        return x


def test_results_of_one_op_cross_to_the_other_half_one_by_one() -> None:
    """The result that a reader needs, never the tuple: a step of x-transformers failed with it."""
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = trained(lambda model, x: model(x).square().mean())
    batch = (torch.linspace(-1, 1, 256).reshape(8, 4, 8).sin(),)
    layout = "pipe=2 micro=2 schedule=zb remat=full"
    assert tutti.verify(step, model, optimizer, batch, layout).ok
    job = Job.of(step, model, optimizer, Layout())
    made = in_time(CandidatePrograms(job, batch).program(Layout.parse(layout)))
    for part in (part for body in made.bodies for part in body.parts.values()):
        inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
        results = part.graph.output_node().all_input_nodes
        assert all(isinstance(n.meta["val"], torch.Tensor) for n in [*inputs, *results])
