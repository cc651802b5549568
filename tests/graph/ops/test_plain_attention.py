"""Fused attention in float64 against autograd of the plain formula, in the form of each kernel of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tutti.graph.edits.promote import promoted
from tutti.graph.ops.plain_attention import PLAIN_FORMS

aten = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 6, 9, 8
NAMES = ("flash", "efficient", "cudnn")


def ops(name: str) -> tuple[Any, Any]:
    forward = f"_scaled_dot_product_{name}_attention"
    return getattr(aten, forward).default, getattr(aten, f"{forward}_backward").default


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def played(
    name: str, given: list[Tensor], bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[tuple[Any, ...], Any]:
    """Results of the forward, and the backward as a function of the gradient."""
    forward, backward = (PLAIN_FORMS[op] for op in ops(name))
    q, k, v = given
    if name == "flash":
        made = forward(q, k, v, 0.0, causal, scale=scale)
        rest = (*made[:6], 0.0, causal, *made[6:8])
        return made, lambda grad: backward(grad, q, k, v, *rest, scale=scale)
    if name == "cudnn":
        made = forward(q, k, v, bias, True, 0.0, causal, scale=scale)
        rest = (*made[:2], *made[6:8], bias, *made[2:6], 0.0, causal)
        return made, lambda grad: backward(grad, q, k, v, *rest, scale=scale)
    made = forward(q, k, v, bias, True, 0.0, causal, scale=scale)
    rest = (bias, *made, 0.0, [True, True, True, bias is not None], causal)
    return made, lambda grad: backward(grad, q, k, v, *rest, scale=scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_as_the_plain_formula(name: str, key_heads: int, causal: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    given = [randn(BATCH, HEADS, QUERIES, DIM)]
    given += [randn(BATCH, key_heads, KEYS, DIM) for _ in range(2)]
    leaves = [x.requires_grad_() for x in given]
    want = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    grad = torch.randn_like(want)
    made, backward = played(name, [x.detach() for x in given], None, causal, scale)
    torch.testing.assert_close(made[0], want.detach())
    for have, x in zip(backward(grad)[:3], torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(have, x)


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_bias_and_a_query_without_keys(name: str) -> None:
    torch.manual_seed(0)
    given = [randn(BATCH, HEADS, n, DIM).requires_grad_() for n in (QUERIES, KEYS, KEYS)]
    bias = randn(1, 1, QUERIES, KEYS)
    bias[..., 2, :] = -torch.inf
    learned = bias.clone().requires_grad_()
    want = F.scaled_dot_product_attention(*given, attn_mask=learned)
    grad = torch.randn_like(want)
    made, backward = played(name, [x.detach() for x in given], bias, False, None)
    torch.testing.assert_close(made[0], want.detach().nan_to_num(0.0))
    keys = [made[0][:, :, 2]]
    assert not any(x.any() for x in keys)
    grad[:, :, 2] = 0
    plain = [x for i, x in enumerate(torch.autograd.grad(want, [*given, learned], grad))]
    for have, x in zip(backward(grad), plain, strict=False):
        if have is not None:
            torch.testing.assert_close(have, x.nan_to_num(0.0))


@pytest.mark.parametrize("length", [31, 32, 33])
def test_the_log_sum_exp_has_the_length_of_the_kernel(length: int) -> None:
    q = randn(1, 1, length, DIM)
    made, _ = played("efficient", [q, q, q], None, False, None)
    assert made[1].shape[-1] == -(-length // 32) * 32


def test_a_promoted_graph_calls_it() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    q.meta["val"] = randn(1, 1, 4, DIM)
    forward, _ = ops("flash")
    both = graph.call_function(forward, (q, q, q, 0.0, True))
    both.meta["val"] = None
    graph.output(both)
    wide = promoted(graph, nn.Module())[0]
    (called,) = (n for n in wide.nodes if n.op == "call_function")
    assert called.target is PLAIN_FORMS[forward]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its kernels not run")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_as_the_kernel_on_a_gpu(name: str, causal: bool) -> None:
    """Results, their shapes, and gradients, up to float16."""
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 40, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    made, backward = played(name, [x.double() for x in given], None, causal, None)
    forward, back = ops(name)
    options = () if name == "flash" else (None, True)
    real = forward(*given, *options, 0.0, causal)
    torch.testing.assert_close(real[0].double(), made[0], rtol=1e-2, atol=1e-2)
    assert real[1].shape == made[1].shape
    lse = real[1].flatten(2)[..., :40].double()
    torch.testing.assert_close(lse, made[1].flatten(2)[..., :40], rtol=1e-2, atol=1e-2)
    grad = torch.randn_like(given[0])
    if name == "flash":
        rest: tuple[Any, ...] = (*real[:6], 0.0, causal, *real[6:8])
    elif name == "cudnn":
        rest = (*real[:2], *real[6:8], None, *real[2:6], 0.0, causal)
    else:
        rest = (None, *real, 0.0, [True, True, True, False], causal)
    for have, want in zip(back(grad, *given, *rest), backward(grad.double()), strict=False):
        if want is not None:
            torch.testing.assert_close(have.double(), want, rtol=2e-2, atol=2e-2)
