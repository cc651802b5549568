"""Gradients that autocast narrows and widens again: the parts of all layers add up before they move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import trained
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.verification.verdict import Subject

LAYERS, SAMPLES, LENGTH, WIDTH = 3, 8, 6, 8


class Biased(nn.Module):
    """Layers of attention that add one bias of positions to their scores, as T5."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.bias = nn.Parameter(torch.randn(1, 2, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (
                y.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for y in layer(x).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype))
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


@trained
def step(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def subject(precision: str) -> Subject:
    torch.manual_seed(0)
    model = Biased()
    batch = (torch.randn(SAMPLES, LENGTH, WIDTH),)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Subject(step, model, optimizer, batch, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bias_of_all_layers_moves_once(precision: str) -> None:
    made, layout = subject(precision), Layout.parse(f"data=2 precision={precision}")
    program = made.program(layout)
    moved = [n for n in program.graph.nodes if n.target is collectives.all_reduce]
    sizes = Counter(tuple(n.meta["val"].shape) for n in moved)
    assert sizes[1, 2, LENGTH, LENGTH] == 1
    verdict = made.verdict(layout, program=program)
    assert verdict.ok and verdict.max_error < 1e-12


def test_one_device_rounds_as_before() -> None:
    def casts(layout: str) -> int:
        graph = subject("bf16").program(Layout.parse(f"{layout} precision=bf16")).graph
        return sum(n.target is torch.ops.aten._to_copy.default for n in graph.nodes)

    assert casts("data=2") == casts("") - 2 * LAYERS
