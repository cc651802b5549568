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
    """Norms with two linear layers behind each, with a bias and a residual connection.

    transposed: the last weight of each is read as it is, (in, out).
    """

    def __init__(self, depth: int = 4, *, transposed: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        down = Transposed if transposed else nn.Linear
        self.downs = nn.ModuleList(down(4 * WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(up(norm(x)).relu())
        return x


class Transposed(nn.Module):
    """A linear layer by `addmm`, such as GPT-2's: its gradient reads a transpose of the input."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, made) / given**0.5)
        self.bias = nn.Parameter(torch.zeros(made))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


PLACE = {
    "ups.*.weight": "tensor, -",
    "ups.*.bias": "tensor",
    "downs.*.weight": "-, tensor",
    "norms.?": "-, tensor, -",
}


def subject(**options: bool) -> Subject:
    torch.manual_seed(0)
    model = Blocks(**options).double()
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


@pytest.mark.parametrize("cut", ["norms.1", "norms.2", "ups.2"])
def test_a_gradient_of_a_residual_crosses_once(cut: str) -> None:
    """The reshaped gradient of a layer at the end of a stage is made there, not sent beside its original."""
    made, layout = subject(transposed=True), Layout.parse("pipe=2 micro=4")
    forward, backward = sent(in_time(made.program(layout), cut_at=[cut]))
    assert backward == forward
    verdict = made.verdict(layout, cut=(cut,))
    assert verdict.max_error < 1e-12
