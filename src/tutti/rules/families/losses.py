"""Losses: sums over elements, divided by the global count for a mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tutti.graph.ops.ctc import ctc_loss, ctc_slopes
from tutti.rules.families.part_ops import nll_backward_part, nll_forward_part
from tutti.rules.rule import (
    Rule,
    broadcast_rule,
    groups,
    operands_of,
    parse_rule,
    results_of,
    shape,
    spelled,
)
from tutti.torch_private.op_tables import schema_of

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _reduction(node: fx.Node) -> tuple[int, int]:
    """The position and the value of the argument `reduction`."""
    for i, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "reduction":
            default = node.kwargs.get("reduction", argument.default_value)
            return i, int(node.args[i] if len(node.args) > i else default)  # type: ignore[arg-type]
    raise AssertionError(node.target)


def _elements(node: fx.Node) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(shape(x) for x in operands_of(node))))


def _forward(node: fx.Node) -> Rule:
    """A loss for each pair of elements, or their sum or mean."""
    operands, _, how = [shape(x) for x in operands_of(node)], *_reduction(node)
    rule = broadcast_rule(operands, _elements(node))
    if how == NONE:
        return rule
    parts = dict.fromkeys(rule.sizes, mean_part) if how == MEAN else {}
    return Rule(rule.operands, ((),), rule.sizes, parts=parts)


def _backward(node: fx.Node) -> Rule:
    operands, _, how = [shape(x) for x in operands_of(node)], *_reduction(node)
    rule = broadcast_rule(operands, shape(node), linear=groups((0,)))
    if how == MEAN:
        rule.parts.update(dict.fromkeys(rule.sizes, mean_part))
    return rule


def mean_part(part: Any) -> fx.Node:
    """The mean: the sum over this rank's elements, divided by the global count."""
    position, _ = _reduction(part.node)
    args, kwargs = list(part.args), dict(part.kwargs)
    if len(args) > position:
        args[position] = SUM
    else:
        kwargs["reduction"] = SUM
    total = part.emit(part.node.target, *args, **kwargs)
    return part.emit(aten.div.Tensor, total, float(math.prod(_elements(part.node))))


def _rows(target: tuple[int, ...]) -> list[str]:
    """Names of the dims of the targets: tokens or samples, then space."""
    return ["n", *(f"s{i}" for i in range(len(target) - 1))]


def _nll_forward(node: fx.Node) -> Rule | None:
    """Tokens split freely; one rank holds the class of each token."""
    operands = [shape(x) for x in operands_of(node)]
    weighted, how = node.args[2] is not None, node.args[3]
    if len(operands[0]) == 1:
        return None
    first, *rest = (f"{r}!" if how == MEAN else r for r in _rows(operands[1]))
    rows, c = " ".join([first, *rest]), "c" if how == SUM and not weighted else "c!"
    logp = " ".join([first, c, *rest])
    loss = rows if how == NONE else ""
    text = f"{logp}, {rows}{', c!' if weighted else ''} -> {loss},"
    rule = parse_rule(text, operands, [tuple(r.shape) for r in results_of(node) if r is not None])
    if c == "c":
        rule.parts["c"] = nll_forward_part
    return rule


def _nll_backward(node: fx.Node) -> Rule | None:
    operands = [shape(x) for x in operands_of(node)]
    weighted, how = node.args[3] is not None, node.args[4]
    if len(operands[1]) == 1 or how == MEAN:
        return None
    first, *rest = _rows(operands[2])
    rows, c = " ".join([first, *rest]), "c!" if weighted else "c"
    logp = " ".join([first, c, *rest])
    grad = rows if how == NONE else ""
    text = f"{grad}, {logp}, {rows}{', c!' if weighted else ''}, -> {logp}"
    rule = parse_rule(text, operands, [shape(node)], linear=groups((0,)))
    if not weighted:
        rule.parts["c"] = nll_backward_part
    return rule


def _margin(node: fx.Node) -> Rule | None:
    """Each sample by itself, with all of its classes; a mean needs all samples."""
    operands, (_, how) = [shape(x) for x in operands_of(node)], _reduction(node)
    name = str(node.target)
    backward = "backward" in name
    if len(operands[int(backward)]) < 2:
        return None
    n = "n!" if how == MEAN else "n"
    loss, classes = n if how == NONE else "", f"{n} c!"
    if "multilabel" in name:
        taken, made = [classes] * (3 if backward else 2), [loss, classes]
    else:
        weighted = len(operands) - backward > 2
        taken, made = [classes, n, *["c!"] * weighted], [loss]
    if backward:
        taken, made = [loss, *taken], [classes]
    linear = groups((0,)) if backward else ()
    return spelled(f"{', '.join(taken)} -> {', '.join(made)}", linear=linear)(node)


# Each sample has its own loss; its paths need all of its time and classes.
_CTC = "t! n c!, n s!, n, n -> n"

RULES = {
    aten.mse_loss.default: _forward,
    aten.mse_loss_backward.default: _backward,
    aten.smooth_l1_loss.default: _forward,
    aten.smooth_l1_loss_backward.default: _backward,
    aten.huber_loss.default: _forward,
    aten.huber_loss_backward.default: _backward,
    aten.soft_margin_loss.default: _forward,
    aten.soft_margin_loss_backward.default: _backward,
    aten.binary_cross_entropy.default: _forward,
    aten.binary_cross_entropy_backward.default: _backward,
    aten.binary_cross_entropy_with_logits.default: _forward,
    aten.multi_margin_loss.default: _margin,
    aten.multi_margin_loss_backward.default: _margin,
    aten.multilabel_margin_loss_forward.default: _margin,
    aten.multilabel_margin_loss_backward.default: _margin,
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll_forward,
    aten.nll_loss2d_backward.default: _nll_backward,
    ctc_loss: _CTC,
    ctc_slopes: f"{_CTC}, t! n c!",
}
