"""Fused attention, on CPU and GPU: batch, heads and queries split freely; keys and head dims stay whole.

With grouped queries each of `g` key heads serves `r` query heads, so the query heads are `(g r)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops.overloads import arguments_of
from tutti.rules.families.part_ops import causal_backward_part, causal_forward_part
from tutti.rules.rule import Rule, groups, operands_of, parse_rule, results_of, shape
from tutti.torch_private.op_tables import schema_of

aten = torch.ops.aten
# The memory-efficient kernel rounds the length of its log-sum-exp up to a multiple of this.
BLOCK = 32


def _mask(dims: tuple[int, ...], q: tuple[int, ...], t: int, queries: str) -> str:
    """The rule term of an additive mask that broadcasts to (batch, heads, queries, keys)."""
    names = (("b", q[0]), ("(g r)", q[1]), (queries, q[2]), ("t!", t))[4 - len(dims) :]
    return " ".join(n if size == have else "1" for (n, size), have in zip(names, dims, strict=True))


def _argument(node: fx.Node, name: str) -> Any:
    return arguments_of(node.target, node.args, node.kwargs).get(name)


def _bind(
    node: fx.Node, results: tuple[str, ...], queries: str = "s", lse: str = "s", **options: Any
) -> Rule:
    """Terms by argument name, `queries` and `lse` for those dims; other tensors stay whole."""
    given = arguments_of(node.target, node.args, node.kwargs)
    q, k = shape(given["query"]), shape(given["key"])
    sizes = {"g": k[1], "r": q[1] // k[1], "t": k[2], "u": BLOCK}
    out = f"b (g r) {queries} e!"
    terms = {"query": f"b (g r) {queries} d!", "key": "b g t! d!", "value": "b g t! e!"}
    terms |= {"out": out, "grad_out": out, "grad_out_": out, "logsumexp": f"b (g r) {lse}"}
    spelled: list[str] = []
    for argument in schema_of(node.target).arguments:
        value = given.get(argument.name)
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], Tensor):
            continue
        if argument.name in ("attn_mask", "attn_bias"):
            spelled.append(_mask(shape(value), q, k[2], queries))
        else:
            spelled.append(terms.get(argument.name, "?"))
    shapes = [None if r is None else tuple(r.shape) for r in results_of(node)]
    # Further results are seeds and lengths, equal on all ranks.
    apart = frozenset(range(len(results), len(shapes)))
    words = [terms[r] for r in results] + ["?"] * len(apart)
    text = f"{', '.join(spelled)} -> {', '.join(words)}"
    operands = [shape(x) for x in operands_of(node)]
    return parse_rule(text, operands, shapes, sizes=sizes, apart=apart, **options)


_FORWARD, _BACKWARD = ("out", "logsumexp"), ("query", "key", "value")


def _cpu_forward(node: fx.Node) -> Rule:
    return _bind(node, _FORWARD, parts={"s": causal_forward_part})


def _cpu_backward(node: fx.Node) -> Rule:
    return _bind(node, _BACKWARD, parts={"s": causal_backward_part}, linear=groups((0,)))


def _gpu_bind(node: fx.Node, results: tuple[str, ...], **options: Any) -> Rule | None:
    """GPU kernels build the causal mask themselves, so causal queries must stay whole."""
    if len(results_of(node)) == 4 and results_of(node)[3] is not None and results == _BACKWARD:
        return None  # a learned bias: its gradient sums over the dims of its broadcast
    queries = lse = "s"
    if "cudnn" in str(node.target):
        lse = "s 1"
    elif "efficient" in str(node.target):
        whole_blocks = shape(_argument(node, "query"))[2] % BLOCK == 0
        queries, lse = ("(s u!)", "(s u!)") if whole_blocks else ("s!", "l!")
    rule = _bind(node, results, queries, lse, **options)
    return replace(rule, whole=rule.whole | {"s"}) if _argument(node, "is_causal") else rule


def _gpu_forward(node: fx.Node) -> Rule | None:
    return _gpu_bind(node, _FORWARD)


def _gpu_backward(node: fx.Node) -> Rule | None:
    return _gpu_bind(node, _BACKWARD, linear=groups((0,)))


RULES = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_backward,
    aten._scaled_dot_product_flash_attention.default: _gpu_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _gpu_backward,
    aten._scaled_dot_product_efficient_attention.default: _gpu_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _gpu_backward,
    aten._scaled_dot_product_cudnn_attention.default: _gpu_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _gpu_backward,
}
