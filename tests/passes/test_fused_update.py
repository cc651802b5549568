"""`fused_update`: before and after as text, the same values, nothing joined that may not be."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.graph.ops.fused_updates import KERNELS
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.graph.text import text
from tutti.layout import Mesh
from tutti.passes.fused_update import fused_update
from tutti.passes.in_place import in_place

aten = torch.ops.aten
SGD = next(k for k in KERNELS if k.name == "sgd")
NAMES = ("p", "g", "m", "q", "h", "n", "lr")
NUMBERS: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}
STATE = frozenset({"p", "m", "q", "n"})


class Written:
    """A graph being written: two parameters, p of shape [4, 3] and q of [5], and a learning rate."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float64)) -> None:
        self.graph = fx.Graph()
        self.values = [torch.randn(4, 3, dtype=dtypes[0]) for _ in range(3)]
        self.values += [torch.randn(5, dtype=dtypes[1]) for _ in range(3)]
        for name, value in zip(NAMES, [*self.values, 0.1], strict=True):
            node = self.graph.placeholder(name)
            node.meta = {"val": value, "name": name}
            setattr(self, name, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def update(self, p: Any, g: Any, m: Any, **numbers: Any) -> list[Any]:
        numbers = {"lr": self.lr, **NUMBERS, "nesterov": False, "maximize": False, **numbers}  # type: ignore[attr-defined]
        made = self.call(SGD.op, [p], [g], [m], **numbers)
        return [self.call(operator.getitem, made, k) for k in range(2)]

    def done(self, returned: list[Any], updates: list[Any]) -> fx.Graph:
        self.graph.output((returned, updates))
        return self.graph

    def run(self) -> list[Tensor]:
        inputs = [x.clone() for x in self.values]
        graph = VirtualRanks(Mesh()).run(self.graph, torch.nn.Module(), [[*inputs, 0.1]])[0]
        return [*graph[0], *graph[1]]


def two(*, between: bool = False, **second: Any) -> Written:
    """Both parameters updated; `between`, what is made of the first result stands before the second."""
    w: Any = Written()
    new_p, new_m = w.update(w.p, w.g, w.m)
    extra = [w.call(aten.mul.Tensor, new_p, 2.0)] if between else []
    new_q, new_n = w.update(w.q, w.h, w.n, **second)
    w.done(extra, [new_p, new_m, new_q, new_n])
    return w


def test_no_message_moves_behind_another_one() -> None:
    """The other pipeline rank receives the new weight before it sends."""
    w: Any = Written()
    new_p, new_m = w.update(w.p, w.g, w.m)
    w.graph.call_function(collectives.send, ([new_p], 0, 1)).meta["val"] = None
    got = w.graph.call_function(collectives.receive, (1, 0, [((5,), torch.float64)]))
    got.meta["val"] = [w.h.meta["val"]]
    h = w.graph.call_function(operator.getitem, (got, 0))
    h.meta["val"] = w.h.meta["val"]
    new_q, new_n = w.update(w.q, h, w.n)
    graph = w.done([], [new_p, new_m, new_q, new_n])
    assert fused_update(graph) == 0
    messages = (collectives.send, collectives.receive)
    assert [n.target for n in graph.nodes if n.target in messages] == [*messages]


def spelled(graph: fx.Graph) -> list[str]:
    return [line.partition(" = ")[2].strip() for line in text(graph).splitlines()][7:]


def test_before_and_after() -> None:
    w = two(between=True)
    numbers = "weight_decay=0.1, momentum=0.9, dampening=0.0, nesterov=False, maximize=False"
    assert spelled(w.graph) == [
        f"sgd([%p], [%g], [%m], lr=%lr, {numbers})",
        "item(%7, 0)",
        "item(%7, 1)",
        "mul.Tensor(%8, 2.0)",
        f"sgd([%q], [%h], [%n], lr=%lr, {numbers})",
        "item(%11, 0)",
        "item(%11, 1)",
    ]
    before = w.run()
    assert fused_update(w.graph) == 1
    w.graph.lint()
    assert spelled(w.graph) == [
        f"sgd([%p, %q], [%g, %h], [%m, %n], lr=%lr, {numbers})",
        "item(%7, 0)",
        "item(%7, 2)",
        "mul.Tensor(%8, 2.0)",
        "item(%7, 1)",
        "item(%7, 3)",
    ]
    assert in_place(w.graph, STATE) >= 4
    assert spelled(w.graph)[0] == f"sgd_([%p, %q], [%g, %h], [%m, %n], lr=%lr, {numbers})"
    assert all(x.equal(y) for x, y in zip(w.run(), before, strict=True))


@pytest.mark.parametrize(
    "second", [{"lr": 0.2}, {"momentum": 0.5}, {"nesterov": True}, {"maximize": True}]
)
def test_other_numbers_stay_apart(second: dict[str, Any]) -> None:
    w = two(**second)
    assert fused_update(w.graph) == 0


def test_other_dtypes_stay_apart() -> None:
    w: Any = Written((torch.float64, torch.float32))
    w.done([], [*w.update(w.p, w.g, w.m), *w.update(w.q, w.h, w.n)])
    assert fused_update(w.graph) == 0


def test_one_that_needs_the_result_of_another_stays_apart() -> None:
    """A second step on p, through a view: only q's first step is free to go with p's."""
    w: Any = Written()
    new_p, new_m = w.update(w.p, w.g, w.m)
    grad = w.call(aten.mul.Tensor, w.call(aten.sin.default, new_p), 0.5)
    last_p, last_m = w.update(w.p, grad, new_m)
    new_q, new_n = w.update(w.q, w.h, w.n)
    w.done([new_p], [last_p, last_m, new_q, new_n])
    before = w.run()
    assert fused_update(w.graph) == 1
    w.graph.lint()
    assert [len(n.args[0]) for n in w.graph.nodes if n.target is SGD.op] == [2, 1]
    assert all(x.equal(y) for x, y in zip(w.run(), before, strict=True))
    in_place(w.graph, STATE)
    assert all(x.equal(y) for x, y in zip(w.run(), before, strict=True))


def test_two_kinds_that_wait_for_each_other_make_no_cycle() -> None:
    """a1 -> b1 and b2 -> a2: the a's may be joined or the b's, not both."""
    w: Any = Written()
    a1, _ = w.update(w.p, w.g, w.m)
    b1, _ = w.update(a1, w.g, w.m, lr=0.2)
    b2, _ = w.update(w.q, w.h, w.n, lr=0.2)
    a2, _ = w.update(b2, w.h, w.n)
    w.done([], [b1, a2])
    before = w.run()
    assert fused_update(w.graph) == 1
    w.graph.lint()
    assert all(x.equal(y) for x, y in zip(w.run(), before, strict=True))


@pytest.mark.parametrize("keep", ["old p", "gradient", "shared"])
def test_in_place_spares_what_is_still_needed(keep: str) -> None:
    w: Any = Written()
    grad = w.p if keep == "shared" else w.g
    new_p, new_m = w.update(w.p, grad, w.m)
    extra = {"old p": [w.p], "gradient": [w.g], "shared": []}[keep]
    w.done(extra, [new_p, new_m])
    before = w.run()
    assert in_place(w.graph, STATE | {"g"}) == (2 if keep == "gradient" else 1)
    w.graph.lint()
    clones = [n for n in w.graph.nodes if n.target is aten.clone.default]
    assert [n.args[0] for n in clones] == ([] if keep == "gradient" else [w.p])
    assert all(x.equal(y) for x, y in zip(w.run(), before, strict=True))


def test_state_that_is_not_donated_keeps_its_value() -> None:
    w = two()
    fused_update(w.graph)
    assert in_place(w.graph, {"p", "m"}) == 2
    inputs = [x.clone() for x in w.values]
    VirtualRanks(Mesh()).run(w.graph, torch.nn.Module(), [[*inputs, 0.1]])
    same = [x.equal(y) for x, y in zip(inputs, w.values, strict=True)]
    assert same == [False, True, False, True, True, True]
