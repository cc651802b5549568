"""The scratch memory of convolutions against the allocator's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutti.execution.measure import peak_nbytes
from tutti.graph.analysis.convolution_scratch import convolution, convolution_backward

aten = torch.ops.aten
# Samples, channels, channels of the result, size, kernel, stride, padding.
IMAGES = [
    (16, 8, 8, 16, 3, 1, 1),
    (16, 3, 8, 16, 3, 1, 1),
    (16, 8, 16, 16, 3, 2, 1),
    (16, 8, 16, 16, 1, 2, 0),
    (16, 8, 16, 16, 1, 1, 0),
    (16, 16, 32, 8, 3, 1, 1),
    (16, 20, 24, 8, 3, 1, 1),
    (16, 16, 16, 16, 4, 2, 1),
    (4, 64, 64, 4, 3, 1, 1),  # few positions, and a large weight
    (4, 64, 96, 4, 3, 2, 1),
]
# The rest: dims, dilation, groups, transposed.
PLAIN = (2, 1, 1, False)
UNFOLDED = [
    *((case, PLAIN) for case in IMAGES),
    ((4, 8, 8, 16, 3, 1, 1), (2, 2, 1, False)),
    ((4, 8, 8, 16, 3, 1, 1), (2, 1, 4, False)),
    ((4, 4, 6, 6, 3, 1, 1), (3, 1, 1, False)),
    ((4, 8, 8, 32, 3, 1, 1), (1, 1, 1, False)),
    ((4, 8, 6, 8, 4, 2, 1), (2, 1, 1, True)),
]


def check(case: tuple[int, ...], rest: Any, dtype: torch.dtype, tolerance: float) -> None:
    n, channels, out, size, kernel, stride, padding = case
    dims, dilation, groups, transposed = rest
    x = torch.randn(n, channels, *[size] * dims, dtype=dtype)
    ends = (channels, out) if transposed else (out, channels // groups)
    weight = torch.randn(*ends, *[kernel] * dims, dtype=dtype)
    how = [stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups

    def forward() -> Any:
        return aten.convolution(x, weight, None, *how)

    given = torch.randn_like(forward())
    peak, y = peak_nbytes(forward)
    assert convolution((x, weight, None, *how), y) + y.nbytes == pytest.approx(peak, rel=tolerance)
    for mask in ([True, True, False], [False, True, False]):
        operands = given, x, weight, None, *how, mask
        aten.convolution_backward(*operands)
        peak, made = peak_nbytes(lambda operands=operands: aten.convolution_backward(*operands))
        found = convolution_backward(operands, made) + sum(y.nbytes for y in made if y is not None)
        assert found == pytest.approx(peak, rel=tolerance)


@pytest.mark.parametrize(("case", "rest"), UNFOLDED)
def test_columns(case: tuple[int, ...], rest: Any) -> None:
    check(case, rest, torch.float64, 0.01)


@pytest.mark.parametrize("case", IMAGES)
def test_blocks(case: tuple[int, ...]) -> None:
    check(case, PLAIN, torch.float32, 0.05)
