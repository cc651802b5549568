"""`simplify`: before and after as text, the same values, and what is not simple stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tutti
from small_programs import Builder, lines
from small_steps import trained
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Layout, Mesh
from tutti.passes.in_place import in_place
from tutti.passes.pass_table import optimized
from tutti.passes.simplify import simplify
from tutti.passes.target import Target
from tutti.verification.verdict import Subject

aten = torch.ops.aten


def _values(graph: fx.Graph, *given: Tensor) -> list[Tensor]:
    inputs = [x.clone() for x in given]
    ((returned, _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [inputs])
    return returned


def _same_values(make: Callable[[], fx.Graph], *given: Tensor) -> None:
    """With the pass too, and with what comes after it."""
    changed = make()
    assert simplify(changed) > 0
    changed.lint()
    in_place(changed, ())
    for a, b in zip(_values(make(), *given), _values(changed, *given), strict=True):
        assert torch.equal(a, b)


def _derivative_of_a_square() -> fx.Graph:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    scaled = b.call(aten.mul.Tensor, x, 1.0)
    power = b.call(aten.pow.Tensor_Scalar, scaled, 1.0)
    return b.done([b.call(aten.mul.Tensor, power, 2.0)], [])


def test_by_the_number_one() -> None:
    graph = _derivative_of_a_square()
    assert lines(graph) == [
        "mul.Tensor(%x, 1.0)",
        "pow.Tensor_Scalar(%1, 1.0)",
        "mul.Tensor(%2, 2.0)",
    ]
    assert simplify(graph) == 2
    assert lines(graph) == ["mul.Tensor(%x, 2.0)"]
    _same_values(_derivative_of_a_square, torch.randn(3))


@pytest.mark.parametrize(
    ("target", "number"),
    [
        (aten.mul.Tensor, 2.0),
        (aten.mul.Tensor, True),
        (aten.pow.Tensor_Scalar, 0.5),
        (aten.sub.Tensor, 1.0),
    ],
)
def test_other_numbers_and_ops_count(target: Any, number: float) -> None:
    b = Builder()
    made = b.call(target, b.given("x", 3, kind="batch"), number)
    assert simplify(b.done([b.call(aten.mul.Tensor, made, 3.0)], [])) == 0


def test_a_result_of_another_type_or_form_stays() -> None:
    for value in (torch.empty(3, dtype=torch.int64), torch.empty(3, 1).expand(3, 4)):
        b = Builder()
        x = b.given("x", 3, kind="batch")
        x.meta["val"] = value
        made = b.call(aten.pow.Tensor_Scalar, x, 1.0)
        made.meta["val"] = torch.empty(value.shape)
        assert simplify(b.done([b.call(aten.relu.default, made)], [])) == 0


def test_what_the_step_returns_is_a_value_of_its_own() -> None:
    b = Builder()
    x = b.given("w", 3)
    assert simplify(b.done([b.call(aten.mul.Tensor, x, 1.0)], [b.call(aten.neg.default, x)])) == 0


def _halves(*, begin: int = 2, dim: int = -1, again: bool = False, third: str = "") -> fx.Graph:
    """Rotary embeddings backwards: the gradients of [0:2] and [begin:5] of five, or of rows.

    third: where another term is added.
    """
    b = Builder()
    sizes = [3, 5] if dim else [5, 3]
    near, far = (
        b.given(n, *shape, kind="batch") for n, shape in zip("ab", _shapes(dim), strict=True)
    )
    rest = b.given("c", *sizes, kind="batch")
    parts = [
        b.call(aten.slice_backward.default, x, sizes, dim, at, end, 1, shape=sizes)
        for x, at, end in ((near, 0, 2), (far, begin, 9223372036854775807))
    ]
    terms = {"": parts[::-1], "first": [rest, *parts], "middle": [parts[0], rest, parts[1]]}[third]
    total = b.call(aten.add.Tensor, *terms[:2])
    if third:
        total = b.call(aten.add.Tensor, terms[2], total)
    return b.done([total, *([parts[0]] if again else [])], [])


def _shapes(dim: int) -> list[tuple[int, int]]:
    return [(3, 2), (3, 3)] if dim else [(2, 3), (3, 3)]


def test_two_halves() -> None:
    graph = _halves()
    assert lines(graph) == [
        "slice_backward(%a, [3, 5], -1, 0, 2, 1)",
        "slice_backward(%b, [3, 5], -1, 2, 9223372036854775807, 1)",
        "add.Tensor(%4, %3)",
    ]
    assert simplify(graph) == 1
    assert lines(graph) == ["cat([%a, %b], 1)"]
    assert simplify(_halves(begin=-3)) == 1


def test_two_halves_and_another_term() -> None:
    graph = _halves(third="middle")
    assert simplify(graph) == 1
    assert lines(graph) == ["cat([%a, %b], 1)", "add.Tensor(%c, %3)"]


@pytest.mark.parametrize("third", ["", "first", "middle"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_two_halves_have_the_same_values(dim: int, third: str) -> None:
    given = [torch.randn(s) for s in (*_shapes(dim), (3, 5) if dim else (5, 3))]
    _same_values(lambda: _halves(dim=dim, third=third), *given)


def test_parts_that_overlap_or_are_read_again_stay() -> None:
    assert simplify(_halves(begin=1)) == 0
    assert simplify(_halves(again=True)) == 0


def _mean_backward(*, reshaped: bool = True, user: Any = aten.mul.Tensor) -> fx.Graph:
    b = Builder()
    total, x = b.given("total", 2, 3, 1, kind="batch"), b.given("x", 6, 8, kind="batch")
    made = b.call(aten.expand.default, total, [2, 3, 8], shape=(2, 3, 8))
    made.meta["val"] = total.meta["val"].expand(2, 3, 8)
    if reshaped:
        made = b.call(aten.reshape.default, made, [6, 8])
        made.meta["val"] = torch.empty(6, 1).expand(6, 8)
    made = b.call(aten.div.Scalar, made, 8)
    given = [made, x] if reshaped else [made]
    return b.done([b.call(user, *given)], [])


def test_a_mean_backwards() -> None:
    graph = _mean_backward()
    assert lines(graph) == [
        "expand(%total, [2, 3, 8])",
        "reshape(%2, [6, 8])",
        "div.Scalar(%3, 8)",
        "mul.Tensor(%4, %x)",
    ]
    assert simplify(graph) == 1
    assert lines(graph) == [
        "div.Scalar(%total, 8)",
        "expand(%2, [2, 3, 8])",
        "reshape(%3, [6, 8])",
        "mul.Tensor(%4, %x)",
    ]
    assert [n.meta["val"].stride() for n in graph.nodes if n.target is aten.reshape.default] == [
        (1, 0)
    ]
    _same_values(_mean_backward, torch.randn(2, 3, 1), torch.randn(6, 8))


def test_what_is_read_in_another_way_is_made_whole() -> None:
    assert simplify(_mean_backward(reshaped=False, user=aten.neg.default)) == 1
    assert simplify(_mean_backward(reshaped=False, user=aten.view_as_real.default)) == 0


def test_numbers_of_one_value_expanded_by_little_stay() -> None:
    b = Builder()
    x = b.given("x", 3, 4, 1, kind="batch")
    made = b.call(aten.expand.default, x, [3, 4, 1], shape=(3, 4, 1))
    made = b.call(aten.mul.Scalar, made, 8)
    assert simplify(b.done([b.call(aten.neg.default, made)], [])) == 0


class Rotary(nn.Module):
    """Halves of each head of a projection turned, and divided by the root of their mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.near(x).unflatten(-1, (2, 4))
        first, second = x[..., :2], x[..., 2:]
        x = (x * 0.5 + torch.cat([-second, first], -1) * 2.0).flatten(2)
        return self.far(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


train_step = trained(lambda model, x, y: (model(x) - y).square().mean())


@pytest.mark.parametrize("layout", ["", "data=2 zero=3", "pipe=2 micro=2", "tensor=2"])
def test_a_model_with_rotary_halves_and_a_norm(layout: str) -> None:
    torch.manual_seed(0)
    model = Rotary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 6, 8), torch.randn(4, 6, 8))
    verdict = tutti.verify(train_step, model, optimizer, batch, layout)
    assert verdict.ok, verdict
    if layout in ("", "data=2 zero=3"):
        program = Subject(train_step, model, optimizer, batch).program(Layout.parse(layout))
        graphs = [optimized(program, Target(), without=w) for w in (("simplify",), ())]
        before, after = (_count(g, aten.slice_backward.default) for g in graphs)
        assert (before, after) == (2, 0)
        before, after = (_count(g, aten.pow.Tensor_Scalar) for g in graphs)
        assert after < before


def _count(graph: fx.Graph, target: Any) -> int:
    return sum(n.target is target for n in graph.nodes)
