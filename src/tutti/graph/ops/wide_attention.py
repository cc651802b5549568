"""Fused attention of GPUs in float64, which their kernels lack: the same results, and the same gradients.

    query     [batch, query heads, queries, head dim]
    key       [batch, key heads, keys, head dim]; each key head serves a run of query heads
    value     [batch, key heads, keys, value dim]
    bias      broadcasts to [batch, query heads, queries, keys]; None without one

A causal query sees the keys up to its own position, counted from the first. Dropout is no part of it: a
captured step draws its own masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the sum of exponentials of each query, [batch, heads, queries]."""
    scores = _scores(query, key, bias, causal, scale)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ _for_each_query_head(value, query), lse


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias."""
    factor = _factor(query, scale)
    weights = _weights(_scores(query, key, bias, causal, scale), lse)
    by_value = grad @ _for_each_query_head(value, query).mT
    by_score = weights * (by_value - (grad * out).sum(-1, keepdim=True))
    by_query = factor * (by_score @ _for_each_query_head(key, query))
    by_key = _for_each_key_head(factor * (by_score.mT @ query), key)
    by_bias = None if bias is None else by_score.sum_to_size(bias.shape)
    return by_query, by_key, _for_each_key_head(weights.mT @ grad, value), by_bias


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    scores = _factor(query, scale) * (query @ _for_each_query_head(key, query).mT)
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax; zeros for a query that sees no key."""
    lse = lse[..., : scores.shape[-2]].unsqueeze(-1)
    return torch.where(lse.isinf(), 0.0, (scores - lse).exp())


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _for_each_key_head(grad: Tensor, like: Tensor) -> Tensor:
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)


# --- in the form of each kernel -------------------------------------------------------------------

_BLOCK = 32  # the memory-efficient kernel rounds the length of its log-sum-exp up


def _state() -> list[Tensor]:
    """The two values of a random state, which no dropout reads."""
    return [torch.zeros((), dtype=torch.int64) for _ in range(2)]


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(query, key, value, None, is_causal, scale)
    lengths = (None, None, query.shape[2], key.shape[2])
    return (out, lse, *lengths, *_state(), None)


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    causal = rest[5]
    given = (grad, query, key, value, None, out, lse, causal, scale)
    return attention_backward(*given)[:3]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(query, key, value, bias, is_causal, scale)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _BLOCK), value=math.inf)
    return (out, lse if compute_log_sumexp else lse[..., :0], *_state())


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    found = attention_backward(grad, query, key, value, bias, out, lse, is_causal, scale)
    return tuple(x if wanted else None for x, wanted in zip(found, grad_input_mask, strict=True))


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(query, key, value, bias, is_causal, scale)
    lengths = (None, None, query.shape[2], key.shape[2])
    return (out, lse.unsqueeze(-1), *lengths, *_state(), None)


def _cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    philox_seed: Any,
    philox_offset: Any,
    bias: Tensor | None,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    causal = rest[5]
    given = (grad, query, key, value, bias, out, lse.squeeze(-1), causal, scale)
    return attention_backward(*given)[:3]


# By the op whose kernel has no float64.
IN_FLOAT64: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
