"""Calls that are alike share one rule, and only those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tutti.rules import rule_of
from tutti.rules.book import Book, call_of

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def pair(first: Call, second: Call) -> list[fx.Node]:
    """Two calls in one graph; an operand is written as its shape, the same shape the same operand."""
    graph = fx.Graph()
    nodes: dict[object, fx.Node] = {}

    def operand(x: Any) -> Any:
        if not isinstance(x, torch.Size):
            return x
        if x not in nodes:
            nodes[x] = graph.placeholder(f"x{len(nodes)}")
            nodes[x].meta["val"] = torch.zeros(x)
        return nodes[x]

    calls = []
    for target, args, kwargs in (first, second):
        node = graph.call_function(target, tuple(map(operand, args)), kwargs)
        vals = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
        node.meta["val"] = target(*vals, **kwargs)
        calls.append(node)
    return calls


SQUARE, WIDE = torch.Size((4, 4)), torch.Size((4, 8))
ALIKE = [
    ((aten.mul.Tensor, (SQUARE, 2.0), {}), (aten.mul.Tensor, (SQUARE, 2.0), {})),
    ((aten.reshape.default, (SQUARE, [16]), {}), (aten.reshape.default, (SQUARE, [16]), {})),
]
APART = [
    ((aten.mul.Tensor, (SQUARE, 2.0), {}), (aten.mul.Tensor, (SQUARE, 2), {})),
    ((aten.mul.Tensor, (SQUARE, 1), {}), (aten.mul.Tensor, (SQUARE, True), {})),
    ((aten.mul.Tensor, (SQUARE, 2.0), {}), (aten.mul.Tensor, (WIDE, 2.0), {})),
    ((aten.mul.Tensor, (SQUARE, 2.0), {}), (aten.add.Tensor, (SQUARE, 2.0), {})),
    ((aten.mul.Tensor, (SQUARE, 2.0), {}), (aten.mul.Tensor, (SQUARE, SQUARE), {})),
    ((aten.reshape.default, (SQUARE, [16]), {}), (aten.reshape.default, (SQUARE, [2, 8]), {})),
    (
        (aten._to_copy.default, (SQUARE,), {"dtype": torch.float64}),
        (aten._to_copy.default, (SQUARE,), {"dtype": torch.float16}),
    ),
    (
        (aten.sum.dim_IntList, (SQUARE, [0]), {}),
        (aten.sum.dim_IntList, (SQUARE, [1]), {}),
    ),
]


@pytest.mark.parametrize(("first", "second"), ALIKE)
def test_calls_that_are_alike_share_a_rule(first: Call, second: Call) -> None:
    one, other = pair(first, second)
    book = Book()
    assert book.of(one) is book.of(other) is not None
    assert book.num_rules == 1
    assert str(book.of(one)) == str(rule_of(one))


@pytest.mark.parametrize(("first", "second"), APART)
def test_calls_that_differ_in_anything_have_rules_of_their_own(first: Call, second: Call) -> None:
    one, other = pair(first, second)
    book = Book()
    assert call_of(one) != call_of(other)
    assert book.of(one) is not book.of(other)
    for node in (one, other):
        assert str(book.of(node)) == str(rule_of(node))


def test_a_book_for_a_copy_has_the_rules_and_none_of_the_nodes() -> None:
    one, other = pair(*ALIKE[0])
    book = Book()
    rule = book.of(one)
    copy = book.for_copy()
    assert not copy._by_node and copy.of(other) is rule and copy.num_rules == 1
    assert list(book._by_node) == [one]


def test_one_operand_twice_is_not_two_operands() -> None:
    """x * x is no linear op of x."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    square, product = (graph.call_function(aten.mul.Tensor, (x, z)) for z in (x, y))
    for node in (x, y, square, product):
        node.meta["val"] = torch.zeros(4, 4)
    assert call_of(square) != call_of(product)
