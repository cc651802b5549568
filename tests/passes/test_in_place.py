"""`in_place`: before and after as text, the same values, and nothing overwritten that is still needed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx

import subjects
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.graph.text import text
from tutti.layout import Layout, Mesh
from tutti.passes.in_place import in_place
from tutti.verification.comparisons import PARTITION_TOLERANCE

aten = torch.ops.aten


def _graph(*, p_needed_later: bool = False, viewed_later: bool = False) -> fx.Graph:
    """A decoupled weight decay and an update: p * 0.99 + u, u = g * 2."""
    graph = fx.Graph()

    def note(node: fx.Node, name: str = "") -> fx.Node:
        node.meta["val"] = torch.empty(4, 4)
        if name:
            node.meta["name"] = name
        return node

    p, g = (note(graph.placeholder(n), n) for n in ("p", "g"))
    decayed = note(graph.call_function(aten.mul.Tensor, (p, 0.99)))
    view = note(graph.call_function(aten.permute.default, (decayed, [1, 0])))
    step = note(graph.call_function(aten.mul.Tensor, (g, 2.0)))
    new = note(graph.call_function(aten.add.Tensor, (decayed, step)))
    out = [view] if viewed_later else [p] if p_needed_later else []
    graph.output((out, [new]))
    return graph


def _run(graph: fx.Graph, p: Tensor, g: Tensor) -> list[Tensor]:
    returned, new = VirtualRanks(Mesh()).run(graph, torch.nn.Module(), [[p.clone(), g.clone()]])[0]
    return [*returned, *new]


def test_before_and_after() -> None:
    graph = _graph()
    assert in_place(graph, {"p"}) == 2
    assert [line.partition(" = ")[2].strip() for line in text(graph).splitlines()][2:] == [
        "mul_.Tensor(%p, 0.99)",
        "permute(%2, [1, 0])",
        "mul.Tensor(%g, 2.0)",
        "add_.Tensor(%2, %4)",
    ]


@pytest.mark.parametrize(
    "needs, donated, count",
    [
        ({}, {"p", "g"}, 3),
        ({}, (), 1),
        ({"p_needed_later": True}, {"p"}, 1),
        ({"viewed_later": True}, {"p"}, 1),
    ],
)
def test_only_what_is_dead_is_overwritten(
    needs: dict[str, bool], donated: set[str], count: int
) -> None:
    p, g = torch.randn(4, 4), torch.randn(4, 4)
    before = _run(_graph(**needs), p, g)
    graph = _graph(**needs)
    assert in_place(graph, donated) == count
    for a, b in zip(_run(graph, p, g), before, strict=True):
        assert torch.equal(a, b)


def test_two_states_with_one_new_value_get_memory_each() -> None:
    graph = _graph()
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    (new,) = output.args[0][1]  # type: ignore[index]
    output.args = (([], [new, new]),)
    in_place(graph, {"p"})
    a, b = _run(graph, torch.randn(4, 4), torch.randn(4, 4))
    assert torch.equal(a, b)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp_muon", "adafactor", "gpt2"])
@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_a_whole_program_stays_the_same_step(name: str, layout: str) -> None:
    subject = subjects.subject(name)
    program = subject.program(Layout.parse(layout), None)
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, mapped))
    state = {s.name for s in program.captured.state}
    assert in_place(graph, state) > len(program.captured.updated)
    edited = copy.copy(program)
    edited.graph = graph
    edited.made = [(v, mapped[n], s) for v, n, s in program.made if n in mapped]
    # Not a whole verdict: it looks at gradients at the end, which the edited graph has overwritten by then.
    found = subject._compared(edited, lambda p: subject.played(p, ()))
    assert found.worst <= PARTITION_TOLERANCE, found.name
