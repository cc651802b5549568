"""Splits of an op's factors, from those of its tensors."""

from __future__ import annotations

import pytest

from tutti.layout import Mesh, Sharding
from tutti.propagate.factors import merged, read
from tutti.rules.rule import parse_rule

MESH = Mesh.parse("data=2 tensor=2")
MATMUL = parse_rule("m k, k n -> m n", [(8, 8), (8, 8)], [(8, 8)])
ROWS, COLUMNS, OUT = (*MATMUL.operands, MATMUL.results[0])


def split(text: str) -> Sharding:
    return Sharding.parse(text, (8, 8))


@pytest.mark.parametrize("partly", [False, True])
def test_an_axis_that_is_taken_leaves_the_others(partly: bool) -> None:
    pairs = [(COLUMNS, split("-, tensor")), (ROWS, split("data+tensor, -"))]
    found = read(MATMUL, pairs, MESH, partly=partly)
    assert found["n"] == split("-, tensor").dims[1]
    assert found.get("m") == (split("data, -").dims[0] if partly else None)


def test_two_tensors_split_one_dim_together() -> None:
    pairs = [(ROWS, split("4@data*2, -")), (OUT, split("4*2@tensor, -"))]
    assert read(MATMUL, pairs, MESH)["m"] == split("4@data*2@tensor, -").dims[0]


def test_merged_shardings_have_the_axes_of_both() -> None:
    one, other = split("4@data*2, -"), split("4*2@tensor, -")
    assert merged(one, other, MESH) == merged(other, one, MESH) == split("4@data*2@tensor, -")
    assert merged(split("data, -"), split("tensor, -"), MESH) == split("data, -")
