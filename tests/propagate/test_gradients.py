"""What makes a gradient is split as its weight is, also where nothing else asks for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zoo_steps
from tutti.layout import Layout
from tutti.verification.verdict import Subject

NUM_TOKENS, WIDTH = 64, 8


class Twice(nn.Module):
    """An embedding that is looked up twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens) + self.mix(self.table(tokens.flip(-1))))


def subject() -> Subject:
    torch.manual_seed(0)
    model = Twice()
    batch = (torch.randint(NUM_TOKENS, (4, 6)), torch.randint(NUM_TOKENS, (4, 6)))
    return Subject(zoo_steps.plain_step, model, torch.optim.AdamW(model.parameters()), batch)


PLACE = {"table.weight": "tensor, -", "head.weight": "tensor, -"}


@pytest.mark.parametrize("layout", ["tensor=2", "data=2 tensor=2 zero=3", "tensor=4 micro=2"])
def test_no_rank_makes_the_gradient_of_a_table_whole(layout: str) -> None:
    program = subject().program(Layout.parse(layout), place=PLACE)
    made = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.target is torch.ops.aten.embedding_dense_backward.default
    ]
    ways = program.mesh.size("tensor")
    assert made == [(NUM_TOKENS // ways, WIDTH)] * 2
    verdict = subject().verdict(Layout.parse(layout), PLACE)
    assert verdict.ok, verdict


def test_a_table_that_is_whole_has_a_whole_gradient() -> None:
    program = subject().program(Layout.parse("data=2 zero=1"))
    shapes = {
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.target is torch.ops.aten.embedding_dense_backward.default
    }
    assert shapes == {(NUM_TOKENS, WIDTH)}
