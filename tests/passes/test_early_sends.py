"""`early_sends`: a value that another place waits for leaves in the middle of the part that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tutti
from ranks import Ranks
from tutti.execution import loops
from tutti.execution.loops import Loops, RowEngine
from tutti.graph.ops.loop import SEND, Body, Do, LoopPart, graphs_of, loop, post
from tutti.layout import Layout
from tutti.passes.early_sends import early_sends
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.verification.verdict import Subject

DIM = 64


class Skip(nn.Module):
    """Four layers; what the first has made is added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:3]:
            x = torch.tanh(layer(x))
        return self.layers[3](x) + first


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def made() -> Timed:
    """The skip leaves pipeline rank 0 long before its last value does."""
    torch.manual_seed(0)
    model = Skip()
    batch = (torch.randn(256, DIM), torch.randn(256, DIM))
    subject = Subject(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    program = subject.program(Layout.parse("pipe=2 micro=2"))
    return in_time(program, cut_at=["layers.3"])


class Wire:
    """A channel that notes what goes through it, and whether more follows."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.more: list[bool] = []

    def send(self, x: Tensor, *, more: bool = False) -> None:
        self.events.append(x.clone())
        self.more.append(more)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype)


def sent_by(made: Timed, body: Body) -> list[Any]:
    """What pipeline rank 0 sends while it plays its row, and "end" where a part has ended."""
    events: list[Any] = []

    class Noting(RowEngine):
        def call(self, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool) -> Any:
            found = super().call(part, inputs, micro, adding=adding)
            events.append("end")
            return found

    wires: Any = {edge: Wire(events) for edge in ((0, 1), (1, 0))}
    mesh = made.programs[0].mesh
    played = Loops(nn.Module(), None, mesh, {"pipe": 0}, {0: 0, 1: 1}, wires)
    inputs = [zip(p.inputs, p.graph.nodes, strict=False) for p in body.parts.values()]
    vals = {name: node.meta["val"] for pairs in inputs for name, node in pairs}
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(vals[name].shape, generator=generator) for name in body.given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "RowEngine", Noting)
        played(body)(given, lambda stream: 0)
    # Two messages of two values: the receiver wakes at the last.
    assert wires[0, 1].more == [True, False] * 2
    return events


def body_of(made: Timed, *, without: tuple[str, ...] = ()) -> Body:
    graph = optimized(made.programs[0], Target(), without=without)
    return next(n.args[0] for n in graph.nodes if n.op == "call_function" and n.target is loop)  # type: ignore[return-value]


def test_a_skip_leaves_in_the_middle_and_the_last_value_at_the_end(made: Timed) -> None:
    """Equal values in the same order, the first of them before the forward has ended."""
    early, late = (sent_by(made, body_of(made, without=w)) for w in ((), ("early_sends",)))
    kinds = [["end" if isinstance(x, str) else "sent" for x in events] for events in (early, late)]
    assert (
        kinds[0][:6] == ["sent", "end", "sent"] * 2 and kinds[1][:6] == ["end", "sent", "sent"] * 2
    )
    values = [[x for x in events if isinstance(x, Tensor)] for events in (early, late)]
    assert len(values[0]) == len(values[1]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def trained(layout: str) -> tuple[list[float], int]:
    """The losses of three steps, and how many values are sent early."""
    torch.manual_seed(0)
    model = Skip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(256, DIM), torch.randn(256, DIM))
    cut = ["layers.3"] if layout else ()
    step = tutti.distribute(train_step, model, optimizer, layout, cut=cut)
    losses = [float(step(*batch)) for _ in range(3)]
    assert step._last is not None and step._last.execution.graph is not None
    every = (n for graph in graphs_of(step._last.execution.graph) for n in graph.nodes)
    return losses, sum(n.target is post for n in every)


def test_on_two_ranks(ranks: Ranks) -> None:
    expected, _ = trained("")
    results = ranks.run(trained, "pipe=2 micro=2", n=2)
    assert all(count for _, count in results)  # the skip, and its gradient
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)


def part_of(nbytes_behind: int) -> Body:
    """A part that makes `a`, which is sent, and then something from it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.tanh.default, (x,))
    b = graph.call_function(torch.ops.aten.mm.default, (a, a))
    for node in (x, a, b):
        node.meta["val"] = torch.empty(nbytes_behind, nbytes_behind, device="meta")
    graph.output(([a, b], []))
    row = (Do("F", 0, 0), Do("F", 0, 0, SEND, 1))
    parts = {(0, "F"): LoopPart(graph, ("x",), ("a", "b"))}
    return Body(1, parts, row, ("x",), (), (), {(0, "F", 1): ("a", "b")})


def test_only_where_what_follows_takes_time() -> None:
    for size, count in ((4, 0), (512, 1)):
        body = part_of(size)
        assert early_sends(body) == count
        targets = [n.target for n in body.parts[0, "F"].graph.nodes if n.op == "call_function"]
        assert (post in targets) == bool(count)
        if count:  # right behind what makes it
            assert targets.index(post) == 1


def test_what_stays_on_the_same_rank_is_not_sent() -> None:
    body = part_of(512)
    both = Body(**{**vars(body), "parts": {**body.parts, (1, "F"): body.parts[0, "F"]}})
    assert early_sends(both) == 0
