"""Datasets for tests of loaders."""

from __future__ import annotations

import torch
from torch import Tensor


class Numbers:
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i])
