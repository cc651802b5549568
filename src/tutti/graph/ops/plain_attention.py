"""Fused attention of GPUs in plain ops: in float64, which their kernels lack, and with masks of dropout.

    query     [batch, query heads, queries, head dim]
    key       [batch, key heads, keys, head dim]; each key head serves a run of query heads
    value     [batch, key heads, keys, value dim]
    bias      broadcasts to [batch, query heads, queries, keys]; None without one
    kept      [batch, query heads, queries, keys], the weights that dropout keeps; None without dropout

A causal query sees the keys up to its own position, counted from the first. Products and weights have the
dtype of the operands; a softmax adds in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.graph.ops.overloads import arguments_of
from tutti.torch_private.op_tables import schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Scoring:
    """How queries and keys give weights.

    bias, causal, kept: as above. scale: of the scores; None for that of the head dim. dropout: the
    probability that a weight is dropped.
    """

    bias: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    dropout: float = 0.0
    kept: Tensor | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """[batch, query heads, queries, keys]; numbers, too, for a query that sees no key."""
        scores = self.scaled(query) @ _for_each_query_head(key, query).mT
        if self.bias is not None:
            scores = scores + self.seeing(self.bias)
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        return scores

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """The softmax of the scores."""
        return aten._softmax(self.scores(query, key), -1, False).to(query.dtype)

    def seeing(self, x: Tensor) -> Tensor:
        """The bias, results or gradients with zeros for queries that see no key: the bias says which."""
        if self.bias is None:
            return x
        return x.masked_fill((self.bias == -math.inf).all(-1, keepdim=True), 0.0)

    def scaled(self, x: Tensor) -> Tensor:
        """Queries, or gradients of them."""
        return x * (1 / math.sqrt(x.shape[-1]) if self.scale is None else self.scale)

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights, or their gradients, with zeros where dropout has them; `grown` makes up for these."""
        return weights if self.kept is None else weights * self.kept

    def grown(self, x: Tensor) -> Tensor:
        """Values, or gradients, larger by what dropout takes."""
        if self.kept is None:
            return x
        return x * (0.0 if self.dropout == 1 else 1 / (1 - self.dropout))


def attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """The result, and without dropout the logarithm of the sum of exponentials, [batch, heads, queries]."""
    weights = scoring.dropped(scoring.weights(query, key))
    out = scoring.seeing(weights @ scoring.grown(_for_each_query_head(value, query)))
    return out, scoring.scores(query, key).logsumexp(-1) if scoring.kept is None else None


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias."""
    weights, bias = scoring.weights(query, key), scoring.bias
    grad = scoring.seeing(scoring.grown(grad))
    by_weight = scoring.dropped(grad @ _for_each_query_head(value, query).mT)
    by_score = aten._softmax_backward_data(by_weight, weights, -1, weights.dtype)
    by_query = scoring.scaled(by_score @ _for_each_query_head(key, query))
    by_key = _for_each_key_head(by_score.mT @ scoring.scaled(query), key)
    by_value = _for_each_key_head(scoring.dropped(weights).mT @ grad, value)
    by_bias = None if bias is None else by_score.sum_to_size(bias.shape).to(bias.dtype)
    return by_query, by_key, by_value, by_bias


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    group = query.shape[1] // x.shape[1]
    if group == 1:
        return x
    return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _for_each_key_head(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)


# --- in the form of each kernel -------------------------------------------------------------------

_BLOCK = 32  # the memory-efficient kernel rounds the length of its log-sum-exp up
# The state of a kernel's random numbers, in which the mask of a plain form travels to its backward.
_RANDOM_STATE = ("rng_state", "philox_seed")


def _played(op: Any) -> Callable[..., tuple[Any, ...]]:
    """The forward in the form of `op`: its arguments and results by their names; `kept` with dropout."""
    results = [r.name for r in schema_of(op).returns]

    def forward(*args: Any, kept: Tensor | None = None, **named: Any) -> tuple[Any, ...]:
        x = arguments_of(op, args, named)
        out, lse = attention(x["query"], x["key"], x["value"], _scoring(x, kept))
        nothing = torch.zeros((), dtype=torch.int64)
        if lse is None:
            lse = nothing
        elif op is aten._scaled_dot_product_cudnn_attention.default:
            lse = lse.unsqueeze(-1)
        elif op is aten._scaled_dot_product_efficient_attention.default:
            padded = F.pad(lse, (0, -lse.shape[-1] % _BLOCK), value=math.inf)
            lse = padded if x["compute_log_sumexp"] else padded[..., :0]
        made: dict[str, Any] = dict.fromkeys(("unused", "philox_offset"), nothing)
        made |= dict.fromkeys(_RANDOM_STATE, nothing if kept is None else kept)
        made |= {"output": out, "logsumexp": lse, "log_sumexp": lse}
        made |= {"max_q": x["query"].shape[2], "max_k": x["key"].shape[2]}
        return tuple(made.get(name) for name in results)

    return forward


def _played_backward(op: Any) -> Callable[..., tuple[Any, ...]]:
    """The backward in the form of `op`."""

    def backward(*args: Any, **named: Any) -> tuple[Any, ...]:
        x = arguments_of(op, args, named)
        grad = x["grad_out_"] if "grad_out_" in x else x["grad_out"]
        scoring = _scoring(x, x["philox_seed"] if x["dropout_p"] > 0 else None)
        found = attention_backward(grad, x["query"], x["key"], x["value"], scoring)
        wanted = x.get("grad_input_mask", [True] * 3)
        return tuple(g if w else None for g, w in zip(found, wanted, strict=False))

    return backward


def _scoring(x: dict[str, Any], kept: Tensor | None) -> Scoring:
    return Scoring(x.get("attn_bias"), x["is_causal"], x["scale"], x["dropout_p"], kept)


# By the op of a kernel, its plain form; a forward with dropout takes the mask as `kept`.
FORWARDS: dict[Any, Callable[..., tuple[Any, ...]]] = {}
BACKWARDS: dict[Any, Callable[..., tuple[Any, ...]]] = {}
for _name in ("flash", "efficient", "cudnn"):
    _op = getattr(aten, f"_scaled_dot_product_{_name}_attention").default
    _back = getattr(aten, f"_scaled_dot_product_{_name}_attention_backward").default
    FORWARDS[_op], BACKWARDS[_back] = _played(_op), _played_backward(_back)
PLAIN_FORMS = {**FORWARDS, **BACKWARDS}
