"""What a call costs in multiplications and additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tutti.graph.analysis.cost import RATES, flops_of_call, rates_for, seconds_of

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


def matmul_seconds(dtype: torch.dtype) -> float:
    """Of 1,024 rows and as many columns, on values of this machine."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1024, 1024, dtype=dtype, device="meta")
    node = graph.call_function(aten.mm.default, (x, x))
    node.meta["val"] = x.meta["val"]
    return seconds_of(node)


def test_a_gpu_computes_slower_in_float32() -> None:
    """A cut that takes its work for cheap avoids messages, and has one long stage."""
    here = matmul_seconds(torch.float32)
    with rates_for("cuda"):
        wide, narrow = matmul_seconds(torch.float32), matmul_seconds(torch.bfloat16)
    more = 2 * 1024**3 * (1 / RATES["cuda"].wide_flops - 1 / RATES["cuda"].flops)
    assert wide - narrow > 0.9 * more > 0
    assert matmul_seconds(torch.float32) == here > wide
