"""Lookups in rows, `x[arange(n), index]`, become gathers and scatters with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from canonical_graph import canonical, played, targets

aten = torch.ops.aten
Index = Callable[[Tensor], tuple[Any, ...]]
ALL = slice(None)


def _places(*shape: int, below: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-below, below, shape, generator=generator)


# What x[8, 6, 5] is looked up with, and whether that pairs dims.
PAIRED: dict[str, Index] = {
    "one of each row": lambda i: (torch.arange(8), i),
    "two of each row": lambda i: (torch.arange(8)[:, None], i.reshape(8, 1).expand(8, 2)),
    "rows last": lambda i: (torch.arange(8).expand(2, 8), i),
    "of int32": lambda i: (torch.arange(8, dtype=torch.int32), i.int()),
    "in the middle": lambda i: (ALL, torch.arange(6), i[:6] % 5),
    "rows behind": lambda i: (i[:5], ALL, torch.arange(5)),
    "in two dims": lambda i: (torch.arange(8), i, i % 5),
    "the diagonal": lambda i: (ALL, torch.arange(6), torch.arange(6) % 5),
    "steps of a sum": lambda i: (torch.ones(8, dtype=torch.int64).cumsum(0) - 1, i),
}
PLAIN: dict[str, Index] = {
    "no rows": lambda i: (i,),
    "counted further": lambda i: (torch.arange(1, 7), i[:6]),
    "fewer rows": lambda i: (torch.arange(4), i[:4]),
    "all counted": lambda i: (torch.arange(8),),
}


@pytest.mark.parametrize("name", PAIRED)
def test_a_lookup_in_rows_is_a_gather(name: str) -> None:
    x, i = torch.randn(8, 6, 5), _places(8)
    graph = canonical(lambda x, i: x[PAIRED[name](i)], x, i)
    assert aten.gather.default in targets(graph)
    assert aten.index.Tensor not in targets(graph)
    assert torch.equal(played(graph, x, i), x[PAIRED[name](i)])


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("name", PAIRED)
def test_a_write_into_rows_is_a_scatter(name: str, adding: bool) -> None:
    x, i = torch.randn(8, 6, 5), _places(8)
    index = PAIRED[name](i)
    values = torch.randn(x[index].shape)
    if name == "two of each row":
        values = values[:, :1]  # the places of a row are the same: which value stays would be open

    def write(x: Tensor, i: Tensor, values: Tensor) -> Tensor:
        return aten.index_put(x, [None if k == ALL else k for k in PAIRED[name](i)], values, adding)

    graph = canonical(write, x, i, values)
    assert aten.index_put.default not in targets(graph)
    torch.testing.assert_close(played(graph, x, i, values), write(x, i, values))


@pytest.mark.parametrize("name", PLAIN)
def test_other_lookups_stay(name: str) -> None:
    x, i = torch.randn(8, 6, 5), _places(8)
    graph = canonical(lambda x, i: x[PLAIN[name](i)], x, i)
    assert aten.index.Tensor in targets(graph)
    assert torch.equal(played(graph, x, i), x[PLAIN[name](i)])


def test_a_place_that_is_not_there_is_an_error_still() -> None:
    x, i = torch.randn(8, 6, 5), torch.full((8,), 6)
    graph = canonical(lambda x, i: x[torch.arange(8), i], x, i.clamp(max=5))
    for wrong in (6, -7):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
            played(graph, x, torch.full((8,), wrong))
