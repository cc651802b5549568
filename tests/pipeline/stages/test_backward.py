"""The stages of ops that read one gradient alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from small_steps import squares, trained
from tutti.graph.ops.loop import SEND
from tutti.layout import Layout
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.verification.verdict import Subject

WIDTH, SAMPLES, TOKENS = 32, 64, 16


class Blocks(nn.Module):
    """Norms with two linear layers behind each, with a bias and a residual connection."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(up(norm(x)).relu())
        return x


PLACE = {
    "ups.*.weight": "tensor, -",
    "ups.*.bias": "tensor",
    "downs.*.weight": "-, tensor",
    "norms.?": "-, tensor, -",
}


def subject() -> Subject:
    torch.manual_seed(0)
    model = Blocks().double()
    batch = torch.randn(SAMPLES, TOKENS, WIDTH).double()
    return Subject(trained(squares), model, torch.optim.SGD(model.parameters(), 0.1), (batch,))


def sent(made: Timed) -> list[int]:
    """The numbers of tensors in the messages of one micro-batch."""
    return [
        len(body.messages[do.stage, do.kind, do.other])
        for body in made.bodies
        for do in body.row
        if do.way == SEND and do.micro == 0
    ]


@pytest.mark.parametrize("cut", ["downs.1", "ups.1", "norms.2"])
@pytest.mark.parametrize("layout", ["pipe=2 micro=4", "pipe=2 tensor=2 micro=4"])
def test_a_gradient_crosses_once(layout: str, cut: str) -> None:
    made = subject()
    program = made.program(Layout.parse(layout), PLACE)
    forward, backward = sent(in_time(program, cut_at=[cut]))
    assert backward == forward
