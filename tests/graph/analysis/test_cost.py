"""What a call costs in multiplications and additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tutti.graph.analysis.cost import flops_of_call

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 3 x 8 heads, 10 places, width 4; keys of 6 places."""
    key = torch.empty(3, key_heads, 6, 4, device="meta")
    return torch.empty(3, 8, 10, 4, device="meta"), key, key


@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_is_two_matmuls_a_head_of_the_queries(key_heads: int) -> None:
    """Twice as much for each matmul's multiplications and additions; also where heads share their keys."""
    expected = 2 * 2 * 3 * 8 * 10 * 6 * 4
    query, key, value = attention(key_heads)
    assert flops_of_call(FORWARD, (query, key, value), {}, None) == expected
    given: list[Any] = [query, query, key, value, query, None, 0.0, True]
    assert flops_of_call(BACKWARD, given, {}, None) == 2.5 * expected


def test_matmuls_and_others() -> None:
    a, b = torch.empty(5, 6, device="meta"), torch.empty(6, 7, device="meta")
    assert flops_of_call(aten.mm.default, (a, b), {}, a @ b) == 2 * 5 * 6 * 7
    assert flops_of_call(aten.mul.Tensor, (a, a), {}, a * a) is None
