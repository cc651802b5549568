"""Fused attention with dropout, whose kernels draw numbers that no layout could repeat.

    out, lse, seed, offset = _scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)
    becomes
    kept = draw("bernoulli", [batch, heads, queries, keys], [0.9])      takes the place of the seed
    out  = dropout(softmax(q k^T / sqrt(d)), kept) v                    the backward makes them again

Weights take memory for each pair of a query and a key while a layer runs, and the mask until its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.graph.ops.overloads import arguments_of
from tutti.graph.ops.plain_attention import BACKWARDS, FORWARDS, PLAIN_FORMS


def dropout_of(op: Any, args: Any, kwargs: Any) -> float:
    """The probability of dropout in a call of an op of attention."""
    return arguments_of(op, args, kwargs).get("dropout_p", 0.0)


def has_dropout(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is a fused attention with dropout, or the backward of one."""
    return op in PLAIN_FORMS and dropout_of(op, args, kwargs) > 0


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is a fused attention that draws a mask."""
    return op in FORWARDS and has_dropout(op, args, kwargs)


def forward(
    bernoulli: Callable[[Any, float, torch.device], Tensor], op: Any, args: Any, kwargs: Any
) -> tuple[Any, ...]:
    """The results of the kernel, with the mask in place of its random state.

    bernoulli: makes a mask of a shape, true with a probability.
    """
    x = arguments_of(op, args, kwargs)
    query, key = x["query"], x["key"]
    shape = [*query.shape[:-1], key.shape[-2]]
    return FORWARDS[op](*args, kept=bernoulli(shape, 1 - x["dropout_p"], query.device), **kwargs)


def backward(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The gradients, from the mask in place of the random state."""
    return BACKWARDS[op](*args, **kwargs)


def laid_out(made: Any, recorded: Any) -> Any:
    """`made` with its dims in memory in the order that the recorded tensors have: views read them."""
    return tuple(_in_order_of(x, like) for x, like in zip(made, recorded, strict=True))


def _in_order_of(x: Any, like: Any) -> Any:
    if not isinstance(x, Tensor) or not isinstance(like, Tensor) or x.shape != like.shape:
        return x
    order = sorted(range(like.ndim), key=lambda d: -like.stride(d))
    if x.permute(order).is_contiguous():
        return x
    return x.permute(order).contiguous().permute([order.index(d) for d in range(like.ndim)])
