"""`foreach`: before and after as text, the same values, in the one place where it is cheap on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import subjects
from pass_rows import replace_row
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.graph.text import text
from tutti.layout import Layout, Mesh
from tutti.passes.foreach import _LISTS, _PLAIN, foreach
from tutti.passes.in_place import in_place

aten = torch.ops.aten


def written(shapes: Sequence[tuple[int, ...]], calls: Sequence[Any]) -> fx.Graph:
    """For each shape inputs a and b, and a chain of calls that starts with a."""
    graph = fx.Graph()
    made = []
    for i, shape in enumerate(shapes):
        pair = [graph.placeholder(f"{n}{i}") for n in "ab"]
        for node in pair:
            node.meta = {"val": torch.rand(shape, dtype=torch.float64), "name": node.name}
        made.append(pair)
    results = []
    for a, b in made:
        x = a
        for target, *rest in calls:
            options = rest.pop() if rest and isinstance(rest[-1], dict) else {}
            args = [{"a": a, "b": b}.get(r, r) if isinstance(r, str) else r for r in rest]
            values = fx.map_arg(args, lambda n: n.meta["val"])
            new = graph.call_function(target, (x, *args), options)
            val = target(x.meta["val"], *values, **options)
            new.meta = {"val": val, "region": "update"}
            x = new
        results.append(x)
    graph.output(([], results))
    return graph


def run(graph: fx.Graph) -> list[Tensor]:
    inputs = [n.meta["val"].clone() for n in graph.nodes if n.op == "placeholder"]
    return VirtualRanks(Mesh()).run(graph, torch.nn.Module(), [inputs])[0][1]


def spelled(graph: fx.Graph) -> list[str]:
    lines = [line.partition(" = ")[2].strip() for line in text(graph).splitlines()]
    return [line for line in lines if not line.startswith("input")]


CHAIN = [(aten.mul.Tensor, 0.9), (aten.addcmul.default, "b", "b", {"value": 0.5})]


def test_before_and_after() -> None:
    graph = written([(3, 2), (4,)], CHAIN)
    before = run(graph)
    assert foreach(graph, devices=("cpu",)) == 2
    graph.lint()
    assert spelled(graph) == [
        "_foreach_mul.Scalar([%a0, %a1], 0.9)",
        "item(%4, 0)",
        "item(%4, 1)",
        "_foreach_addcmul.Scalar([%5, %6], [%b0, %b1], [%b0, %b1], 0.5)",
        "item(%7, 0)",
        "item(%7, 1)",
    ]
    assert in_place(graph, {"a0", "a1"}) == 4
    assert [line.partition("(")[0] for line in spelled(graph)] == [
        *("_foreach_mul_.Scalar", "item", "item"),
        *("_foreach_addcmul_.Scalar", "item", "item"),
    ]
    assert all(x.equal(y) for x, y in zip(run(graph), before, strict=True))


def test_lists_are_overwritten_whole_or_not_at_all() -> None:
    graph = written([(3, 2), (4,)], CHAIN[:1])
    before = run(graph)
    foreach(graph, devices=("cpu",))
    assert in_place(graph, {"a0"}) == 0
    assert spelled(graph)[0].startswith("_foreach_mul.Scalar")
    assert all(x.equal(y) for x, y in zip(run(graph), before, strict=True))


def test_on_a_cpu_only_what_is_one_number_is_joined() -> None:
    graph = written([(3, 2), (4,)], CHAIN)
    assert foreach(graph) == 0
    counts = written([(), (), ()], [(aten.add.Tensor, 1)])
    before = run(counts)
    assert foreach(counts) == 2
    assert spelled(counts)[0] == "_foreach_add.Scalar([%a0, %a1, %a2], 1)"
    assert all(x.equal(y) for x, y in zip(run(counts), before, strict=True))


CALLS: dict[str, list[Any]] = {
    "add": [(aten.add.Tensor, "b", {"alpha": 0.3}), (aten.add.Tensor, 2.0)],
    "sub": [(aten.sub.Tensor, "b"), (aten.sub.Tensor, 0.5)],
    "mul": [(aten.mul.Tensor, "b"), (aten.mul.Tensor, 2.0)],
    "div": [(aten.div.Tensor, "b"), (aten.div.Tensor, 2.0)],
    "addc": [(aten.addcmul.default, "a", "b"), (aten.addcdiv.default, "a", "b", {"value": -0.1})],
    "lerp": [(aten.lerp.Scalar, "b", 0.3), (aten.lerp.Tensor, "a", "b")],
    "extreme": [(aten.maximum.default, "b"), (aten.minimum.default, "a")],
    "roots": [(aten.sqrt.default,), (aten.rsqrt.default,), (aten.reciprocal.default,)],
    "signs": [(aten.neg.default,), (aten.abs.default,), (aten.sign.default,)],
    "pow": [(aten.pow.Tensor_Scalar, 1.5)],
}


def test_every_op_of_the_table_is_tried() -> None:
    tried = {call[0] for calls in CALLS.values() for call in calls}
    assert tried == {target for target, _ in (*_LISTS, *_PLAIN)}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_values(name: str) -> None:
    graph = written([(3, 2), (4,), (2, 1, 3)], CALLS[name])
    before = run(graph)
    assert foreach(graph, devices=("cpu",)) == 2 * len(CALLS[name])
    for _ in range(2):
        assert all(x.equal(y) for x, y in zip(run(graph), before, strict=True))
        in_place(graph, {f"a{i}" for i in range(3)})


def test_one_value_for_all_is_no_list() -> None:
    """A gradient's scale: one tensor of one number for every parameter."""
    for target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        graph = fx.Graph()
        inputs = [graph.placeholder(n) for n in "abs"]
        for node, shape in zip(inputs, ((3,), (2, 2), ()), strict=True):
            node.meta = {"val": torch.rand(shape, dtype=torch.float64), "name": node.name}
        results = []
        for x in inputs[:2]:
            new = graph.call_function(target, (x, inputs[2]))
            new.meta = {"val": x.meta["val"].clone(), "region": "update"}
            results.append(new)
        graph.output(([], results))
        before = run(graph)
        assert foreach(graph, devices=("cpu",)) == 1
        assert "Tensor([%a, %b], %s)" in spelled(graph)[0]
        assert all(x.equal(y) for x, y in zip(run(graph), before, strict=True))


def test_what_depends_on_another_stays_apart() -> None:
    """b's matmul needs a's: two matmuls in a row on one chain, one on the other."""
    graph = written([(4,)], [(aten.mul.Tensor, 0.9), (aten.mul.Tensor, 0.9)])
    before = run(graph)
    assert foreach(graph, devices=("cpu",)) == 0
    assert all(x.equal(y) for x, y in zip(run(graph), before, strict=True))


@pytest.mark.parametrize("name", ["rmsprop", "adafactor", "mlp_muon", "adamw_loop"])
@pytest.mark.parametrize("layout", ["", "data=2 zero=1", "data=2 zero=3"])
def test_a_whole_program_stays_the_same_step(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []

    def everywhere(graph: fx.Graph, *_: Any) -> None:
        joined.append(foreach(graph, devices=("cpu",)))

    replace_row(monkeypatch, "foreach", on_program=everywhere)
    verdict = subjects.subject(name).verdict(Layout.parse(layout))
    assert verdict.ok, str(verdict)
    assert joined[0] > 0


def test_a_list_is_not_overwritten_that_the_one_value_for_all_lies_in() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.rand(3, dtype=torch.float64), "name": "x"}
    scale = graph.call_function(aten.select.int, (x, 0, 0))
    scale.meta = {"val": torch.rand((), dtype=torch.float64)}
    new = graph.call_function(aten._foreach_mul.Tensor, ([x], scale))
    item = graph.call_function(operator.getitem, (new, 0))
    new.meta, item.meta = {"val": [x.meta["val"]]}, {"val": x.meta["val"]}
    graph.output(([], [item]))
    before = run(graph)
    assert in_place(graph, {"x"}) == 0
    assert all(a.equal(b) for a, b in zip(run(graph), before, strict=True))
