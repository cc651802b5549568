"""Element-by-element ops: derived from PyTorch's own tag, with a short table of their linear operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tutti.rules.rule import Rule, broadcast_rule, groups, operands_of, results_of, shape
from tutti.torch_private.op_tables import OpOverload

aten = torch.ops.aten

# Ops that sum or scale: positions of operands in which the op is jointly linear, a group each.
_SUM = ((0, 1),)
_EACH = ((0,), (1,))
_FIRST = ((0,),)
LINEAR: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.add.Tensor: _SUM,
    aten.sub.Tensor: _SUM,
    aten.rsub.Tensor: _SUM,
    aten.lerp.Scalar: _SUM,
    aten.lerp.Tensor: _SUM,
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.addcdiv.default: _SUM,
    aten.where.self: ((1, 2),),
    aten.mul.Tensor: _EACH,
    aten.copy.default: ((1,),),
    **dict.fromkeys(
        (
            aten.mul.Scalar,
            aten.div.Tensor,
            aten.div.Scalar,
            aten.true_divide.Tensor,
            aten.neg.default,
            aten.positive.default,
            aten.clone.default,
            aten.deg2rad.default,
            aten.rad2deg.default,
            aten.ldexp.Tensor,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.mish_backward.default,
            aten.sigmoid_backward.default,
            aten.tanh_backward.default,
            aten.logit_backward.default,
            aten.threshold_backward.default,
            aten.softplus_backward.default,
            aten.leaky_relu_backward.default,
            aten.hardtanh_backward.default,
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten.softshrink_backward.default,
            aten.hardshrink_backward.default,
            aten.elu_backward.default,
            aten.rrelu_with_noise_backward.default,
            aten._prelu_kernel_backward.default,
            aten.log_sigmoid_backward.default,
            aten.native_dropout_backward.default,
        ),
        _FIRST,
    ),
}
# Without PyTorch's tag, though each element of the result depends on one position only.
UNTAGGED = {
    aten._to_copy.default,
    aten._conj.default,
    aten.complex.default,
    aten.polar.default,
    aten.copy.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.softplus_backward.default,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.mish_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.rsub.Tensor,
    aten._standard_gamma_grad.default,
    aten._dirichlet_grad.default,
    aten.masked_fill.Tensor,
    aten.isin.Tensor_Scalar,
}


def is_pointwise(op: Any) -> bool:
    """Whether each element of the result depends on one position of the operands only."""
    return isinstance(op, OpOverload) and (torch.Tag.pointwise in op.tags or op in UNTAGGED)


def derived_pointwise(node: fx.Node) -> Rule | None:
    """The rule of an element-by-element op, or None for any other."""
    first, *more = results_of(node)
    if not is_pointwise(node.target) or not isinstance(first, Tensor):
        return None
    operands, out = [shape(x) for x in operands_of(node)], tuple(first.shape)
    # `log_sigmoid` on a GPU has an empty buffer beside its result
    stray = [i for i, r in enumerate(more, 1) if r is None or tuple(r.shape) != out]
    buffers = [0 in s and 0 not in out for s in operands]
    linear = tuple(g for g in _linear(node) if all(i < len(operands) for i in g))
    rule = broadcast_rule(
        [out if b else s for s, b in zip(operands, buffers, strict=True)],
        out,
        len(more) + 1,
        linear=linear,
    )
    if not stray and not any(buffers):
        return rule
    results = tuple(
        t if i not in stray else ((),) * (0 if r is None else r.ndim)
        for i, (t, r) in enumerate(zip(rule.results, (first, *more), strict=True))
    )
    terms = tuple(
        ((),) * len(s) if b else t for t, s, b in zip(rule.operands, operands, buffers, strict=True)
    )
    return replace(rule, operands=terms, results=results, apart=frozenset(stray))


def _linear(node: fx.Node) -> tuple[frozenset[int], ...]:
    """The groups of `LINEAR` that the call's arguments keep linear."""
    op, num_tensors = node.target, len(operands_of(node))
    match op:
        case aten.add.Tensor | aten.sub.Tensor | aten.rsub.Tensor if num_tensors < 2:
            return ()  # every rank would add the number
        case aten.mul.Tensor if num_tensors < 2:
            return groups((0,))
        case aten.masked_fill.Scalar:
            return groups((0,)) if node.args[2] == 0 else ()
        case aten._to_copy.default:
            return groups((0,)) if _widens(node) else ()
    return groups(*LINEAR.get(op, ()))


def _widens(node: fx.Node) -> bool:
    """Whether a cast is exact, so that a pending sum may pass; a cast that rounds must follow the sum."""
    before, after = operands_of(node)[0].meta["val"].dtype, node.meta["val"].dtype
    both = before.is_floating_point and after.is_floating_point
    return both and torch.promote_types(before, after) == after
