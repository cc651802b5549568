"""Writes by a mask are captured with PyTorch's values and gradients, whatever the mask picks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from other_forms import traced, with_gradients
from tutti.capture.substitutes.other_forms import in_other_forms

aten = torch.ops.aten
ALL = slice(None)
MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.4
MASK[1], MASK[2] = True, False

# A key of x[4, 6, 3], and the shape of a value.
WRITES: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "a number": (MASK, None),
    "one for all": (MASK, ()),
    "a row": (MASK, (3,)),
    "a row with a dim of places": (MASK, (1, 3)),
    "elements": (MASK[..., None].expand(4, 6, 3), (1,)),
    "samples": (MASK[:, 0], (6, 3)),
    "behind samples": ((ALL, MASK[0]), (3,)),
    "behind samples, apart": ((ALL, MASK[0]), (4, 1, 3)),
    "with dims behind": ((ALL, MASK[0], ALL), (3,)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_value_at_each_place_of_a_mask(name: str) -> None:
    key, shape = WRITES[name]
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    given = [x] if shape is None else [x, torch.randn(shape, dtype=torch.float64)]

    def write(x: Tensor, value: Tensor | float = 0.5) -> Tensor:
        x = x * 1
        x[key] = value
        return x

    have, ops = traced(partial(with_gradients, write), *given)
    assert not ops & {aten.index_put_.default, aten.index.Tensor}
    torch.testing.assert_close(have, with_gradients(write, *given), rtol=1e-12, atol=1e-12)


TWO = (torch.arange(4) < 2, torch.arange(6) < 2)


@pytest.mark.parametrize("key", [(MASK, 0), TWO, torch.arange(2), ..., 1])
def test_other_keys_are_left_to_pytorch(key: Any) -> None:
    x = torch.randn(4, 6, 3)

    def write(x: Tensor) -> Tensor:
        x = x * 1
        x[key] = 2
        return x

    have, _ = traced(write, x)
    assert torch.equal(have, write(x))


def test_another_value_at_each_place_is_left_to_pytorch() -> None:
    x, values = torch.randn(4, 6, 3), torch.randn(int(MASK.sum()), 3)

    def write(x: Tensor, values: Tensor) -> Tensor:
        x = x * 1
        x[MASK] = values
        return x

    have, ops = traced(write, x, values)
    assert torch.equal(have, write(x, values))
    assert aten.index_put_.default in ops


ROWS = {
    "a column": MASK[..., None],
    "a stretched column": MASK[..., None].expand(4, 6, 3),
    "of samples": MASK[:, :1, None],
    "the same of each sample": MASK[3, :, None],
    "all": torch.ones(1, dtype=torch.bool),
    "none": torch.zeros(4, 6, 1, dtype=torch.bool),
}


@pytest.mark.parametrize("more", [0, 4])
@pytest.mark.parametrize("name", ROWS)
def test_rows_taken_in_order(name: str, more: int) -> None:
    """Images among tokens; a source may have elements that are not taken."""
    mask = ROWS[name]
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    taken = max(int(mask.expand(x.shape).sum()), 18)
    source = torch.randn(taken + more, dtype=torch.float64)

    def scatter(x: Tensor, source: Tensor) -> Tensor:
        return x.masked_scatter(mask, source)

    have, ops = traced(partial(with_gradients, scatter), x, source)
    torch.testing.assert_close(have, with_gradients(scatter, x, source), rtol=1e-12, atol=1e-12)
    assert aten.masked_scatter.default not in ops


def test_a_mask_of_elements_is_left_to_pytorch() -> None:
    x, mask = torch.randn(4, 6), MASK
    have, ops = traced(lambda x: x.masked_scatter(mask, x), x)
    assert torch.equal(have, x.masked_scatter(mask, x)) and aten.masked_scatter.default in ops


def test_too_few_rows_are_an_error_still() -> None:
    x, source = torch.randn(4, 6, 3), torch.randn(int(MASK.sum()) - 1, 3)
    with in_other_forms():
        graph = make_fx(lambda x, s, m: x.masked_scatter(m, s))(x, source, torch.zeros(4, 6, 1) > 1)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        graph(x, source, MASK[..., None])
