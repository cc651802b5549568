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
import torch.nn.functional as F
from torch import Tensor

from tutti.graph.ops.overloads import arguments_of
from tutti.torch_private.op_tables import schema_of

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
_RANDOM_STATE = ("rng_state", "unused", "philox_seed", "philox_offset")  # no dropout reads it


def _played(op: Any) -> Callable[..., tuple[Any, ...]]:
    """The forward in the form of `op`: its arguments and results by their names."""
    results = [r.name for r in schema_of(op).returns]

    def forward(*args: Any, **named: Any) -> tuple[Any, ...]:
        x = arguments_of(op, args, named)
        out, lse = attention(*_operands(x))
        if op is aten._scaled_dot_product_cudnn_attention.default:
            lse = lse.unsqueeze(-1)
        elif op is aten._scaled_dot_product_efficient_attention.default:
            padded = F.pad(lse, (0, -lse.shape[-1] % _BLOCK), value=math.inf)
            lse = padded if x["compute_log_sumexp"] else padded[..., :0]
        made: dict[str, Any] = {n: torch.zeros((), dtype=torch.int64) for n in _RANDOM_STATE}
        made |= {"output": out, "logsumexp": lse, "log_sumexp": lse}
        made |= {"max_q": x["query"].shape[2], "max_k": x["key"].shape[2]}
        return tuple(made.get(name) for name in results)

    return forward


def _played_backward(op: Any) -> Callable[..., tuple[Any, ...]]:
    """The backward in the form of `op`."""

    def backward(*args: Any, **named: Any) -> tuple[Any, ...]:
        x = arguments_of(op, args, named)
        grad = x["grad_out_"] if "grad_out_" in x else x["grad_out"]
        query, key, value, bias, causal, scale = _operands(x)
        saved = x["out"], x["logsumexp"].flatten(2)
        found = attention_backward(grad, query, key, value, bias, *saved, causal, scale)
        wanted = x.get("grad_input_mask", [True] * 3)
        return tuple(g if w else None for g, w in zip(found, wanted, strict=False))

    return backward


def _operands(x: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(x[n] for n in ("query", "key", "value")),
        x.get("attn_bias"),
        x["is_causal"],
        x["scale"],
    )


# By the op whose kernel has no float64.
IN_FLOAT64: dict[Any, Callable[..., tuple[Any, ...]]] = {}
for _name in ("flash", "efficient", "cudnn"):
    _op = getattr(aten, f"_scaled_dot_product_{_name}_attention").default
    _back = getattr(aten, f"_scaled_dot_product_{_name}_attention_backward").default
    IN_FLOAT64 |= {_op: _played(_op), _back: _played_backward(_back)}
