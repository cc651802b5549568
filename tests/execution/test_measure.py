"""The peak of a call, as the allocator counts: closed forms, and what was held before is not counted."""

from __future__ import annotations

import torch

from tutti.execution.measure import peak_nbytes

KB = 1024


def test_the_most_that_is_held_at_once() -> None:
    def call() -> torch.Tensor:
        x = torch.empty(4 * KB, dtype=torch.uint8)
        y = torch.empty(8 * KB, dtype=torch.uint8)
        del x
        return torch.empty(2 * KB, dtype=torch.uint8) if y.numel() else y

    nbytes, result = peak_nbytes(call)
    assert nbytes == 12 * KB and result.numel() == 2 * KB


def test_what_was_held_before_is_not_counted() -> None:
    held = torch.zeros(1000 * KB, dtype=torch.uint8)
    assert peak_nbytes(lambda: held.add_(1))[0] < KB
    assert peak_nbytes(lambda: held + 1)[0] >= 1000 * KB


def test_borrowed_memory_counts() -> None:
    x = torch.randn(64, 64)
    assert peak_nbytes(lambda: x.exp().neg().sum())[0] == 2 * x.nbytes
