"""Tensors in fewer bytes, alone: `tests/replicas/test_traffic.py` has the errors that are sent later."""

from __future__ import annotations

import pytest
import torch

from tutti.comm.collectives.compression import COMPRESSIONS


def test_int8_clips_at_six_standard_deviations() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x[0] = 100.0
    deviation = x.square().mean().sqrt()
    parts = COMPRESSIONS["int8"].compress(x)
    back = COMPRESSIONS["int8"].decompress(parts, torch.float32)
    assert back[0].item() == pytest.approx(6 * deviation.item(), rel=1e-5)
    assert (back[1:] - x[1:]).abs().max() <= 6 / 127 / 2 * deviation * 1.001
