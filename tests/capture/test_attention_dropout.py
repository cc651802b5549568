"""Fused attention of GPUs with dropout: masks that no layout changes, in the form of each kernel.

A trace needs no GPU: the kernels' ops have results without memory on any device, and the captured step has
plain ops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from small_steps import trained
from tutti.capture.second_trace.attention_dropout import backward, draws, forward, has_dropout
from tutti.capture.step import capture
from tutti.graph.ops.plain_attention import FORWARDS
from tutti.graph.randomness.draw import draw
from tutti.layout import Layout
from tutti.verification.verdict import Subject

aten = torch.ops.aten
BATCH, HEADS, LENGTH, DIM = 4, 4, 6, 8
WIDTH = HEADS * DIM
KERNELS = {
    "flash": lambda q, k, v, p, causal: aten._scaled_dot_product_flash_attention(q, k, v, p, causal),
    "efficient": lambda q, k, v, p, causal: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, p, causal
    ),
    "cudnn": lambda q, k, v, p, causal: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, p, causal
    ),
}  # fmt: skip


class Attention(nn.Module):
    """A layer of attention as Hugging Face writes it, by one of the kernels, with dropout."""

    def __init__(self, kernel: str, p: float, key_heads: int = HEADS, causal: bool = True) -> None:
        super().__init__()
        self.kernel, self.p, self.key_heads, self.causal = kernel, p, key_heads, causal
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * DIM) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], HEADS, DIM).transpose(1, 2)
        k, v = (
            layer(x).view(*x.shape[:2], self.key_heads, DIM).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        if self.kernel == "efficient":  # it has as many key heads as query heads
            k, v = (x.repeat_interleave(HEADS // self.key_heads, 1) for x in (k, v))
        made = KERNELS[self.kernel](q, k, v, self.p, self.causal)[0]
        return x + self.out(made.transpose(1, 2).contiguous().view(x.shape))


@trained
def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def built(kernel: str, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    layers = [Attention(kernel, 0.25, **options) for _ in range(2)]
    model = nn.Sequential(*layers)
    batch = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    return step, model, torch.optim.SGD(model.parameters(), 0.1), batch


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_draws_a_mask_of_its_own(kernel: str) -> None:
    captured = capture(*built(kernel))
    drawn = captured.graph.find_nodes(op="call_function", target=draw)
    assert [n.args[1] for n in drawn] == 2 * [[BATCH, HEADS, LENGTH, LENGTH]]
    assert not any(n.target in FORWARDS for n in captured.graph.nodes)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("data=2 zero=3", {}),
        ("tensor=2", {}),
        ("data=2 tensor=2", {"key_heads": 2}),
        ("seq=2", {"causal": False}),
        ("pipe=2 micro=2", {}),
        ("data=2 remat=full", {"key_heads": 2, "causal": False}),
    ],
)
def test_any_layout_is_the_same_step(kernel: str, layout: str, options: dict[str, Any]) -> None:
    verdict = Subject(*built(kernel, **options)).verdict(Layout.parse(layout))
    assert verdict.ok and verdict.max_error < 1e-9, str(verdict)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_the_plain_formula(kernel: str, p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, HEADS, LENGTH, DIM, dtype=dtype).requires_grad_() for _ in range(3)]
    kept = torch.rand(2, HEADS, LENGTH, LENGTH) >= p
    scores = (given[0] @ given[1].mT / DIM**0.5).masked_fill(
        ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf
    )
    weights = scores.softmax(-1) * kept * (1 / (1 - p) if p < 1 else 0.0)
    want = weights.to(dtype) @ given[2]
    grad = torch.randn_like(want)
    op, args = recorded(kernel, given, p)
    assert draws(op, args, {})
    made = forward(lambda *_: kept, op, args, {})
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(made[0], want, **near)
    back, rest = backward_call(kernel, [x.detach() for x in given], p, made, grad)
    assert has_dropout(back, rest, {}) and not draws(back, rest, {})
    wanted = torch.autograd.grad(want, given, grad)
    for have, x in zip(backward(back, rest, {})[:3], wanted, strict=True):
        torch.testing.assert_close(have, x, **near)


def recorded(kernel: str, given: list[Tensor], p: float) -> tuple[Any, tuple[Any, ...]]:
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    options = () if kernel == "flash" else (None, True)
    return op, (*(x.detach() for x in given), *options, p, True)


def backward_call(
    kernel: str, given: list[Tensor], p: float, made: tuple[Any, ...], grad: Tensor
) -> tuple[Any, tuple[Any, ...]]:
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    if kernel == "flash":
        return op, (grad, *given, *made[:6], p, True, *made[6:8])
    if kernel == "cudnn":
        return op, (grad, *given, *made[:2], *made[6:8], None, *made[2:6], p, True)
    return op, (grad, *given, None, *made, p, [True, True, True, False], True)


def test_without_dropout_it_stays_one_op() -> None:
    torch.manual_seed(0)
    model = Attention("efficient", 0.0)
    batch = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    captured = capture(step, model, torch.optim.SGD(model.parameters(), 0.1), batch)
    assert any(n.target in FORWARDS for n in captured.graph.nodes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no kernel is chosen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_pytorch_s_own_choice_on_a_gpu(dtype: torch.dtype, masked: bool) -> None:
    """PyTorch takes another kernel for each dtype and mask; the step is that of PyTorch's own formula."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, device="cuda").to(dtype)
    x = torch.randn(4, 32, 64, device="cuda", dtype=dtype)
    mask = torch.zeros(32, 32, device="cuda", dtype=dtype).masked_fill_(
        torch.ones(32, 32, device="cuda").triu(1).bool(), -torch.inf
    )

    @trained
    def train(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, mask if masked else None).float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    verdict = tutti.verify(train, model, optimizer, (x,), "data=2 tensor=2")
    assert verdict.ok, str(verdict)
