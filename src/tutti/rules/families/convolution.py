"""Convolutions and pooling: samples and channels split, space stays whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, operands_of, results_of, shape, spelled

aten = torch.ops.aten


def _terms(node: fx.Node, x: tuple[int, ...], w: tuple[int, ...], at: int) -> Any:
    """Terms of input, weight, bias and output. `at` is the position of the stride argument."""
    transposed, num_groups = bool(node.args[at + 3]), int(node.args[at + 5])  # type: ignore[arg-type]
    space: Term = ((),) * (len(x) - 2)
    if num_groups == 1 and not transposed:
        sizes = {"n": x[0], "ci": x[1], "co": w[0]}
        return (("n",), ("ci",), *space), (("co",), ("ci",), *space), ("co",), sizes
    if not transposed and num_groups == x[1] == w[0]:
        sizes = {"n": x[0], "co": x[1]}
        return (("n",), ("co",), *space), (("co",), (), *space), ("co",), sizes
    return (("n",), (), *space), ((),) * len(w), (), {"n": x[0]}


def _is_depthwise(node: fx.Node, at: int) -> bool:
    return int(node.args[at + 5]) > 1  # type: ignore[arg-type]


def _convolution(node: fx.Node) -> Rule:
    operands = operands_of(node)
    x, w = shape(operands[0]), shape(operands[1])
    xs, ws, co, sizes = _terms(node, x, w, 3)
    out: Term = (("n",), co, *((),) * (len(x) - 2))
    bias = len(operands) > 2
    terms = (xs, ws, (co,)) if bias else (xs, ws)
    whole = frozenset({"ci"} & set(sizes)) if bias else frozenset()
    parts = {"co": _depthwise_part} if _is_depthwise(node, 3) and "co" in sizes else {}
    linear = () if bias else groups((0,), (1,))
    return Rule(terms, (out,), sizes, whole, linear=linear, parts=parts)


def _depthwise_part(part: Any) -> fx.Node:
    """One group per channel: the number of groups is this rank's number of channels."""
    args = list(part.args)
    args[8] = int(args[0].meta["val"].shape[1])
    return part.emit(part.node.target, *args, **part.kwargs)


def _convolution_backward(node: fx.Node) -> Rule:
    x, w = shape(node.args[1]), shape(node.args[2])
    xs, ws, co, sizes = _terms(node, x, w, 4)
    grad: Term = (("n",), co, *((),) * (len(x) - 2))
    results = tuple(
        () if r is None else t for r, t in zip(results_of(node), (xs, ws, (co,)), strict=True)
    )
    depthwise = _is_depthwise(node, 4) and "co" in sizes
    # With split input channels each rank would make the whole gradient of the bias, as a term of a sum.
    whole = frozenset({"ci"} & set(sizes)) if results_of(node)[2] is not None else frozenset()
    return Rule(
        (grad, xs, ws),
        results,
        sizes,
        whole,
        linear=groups((0,)),
        parts={
            f: _backward_part for f in ("n", "co", "ci") if f in sizes and (f == "co" or depthwise)
        },
    )


def _backward_part(part: Any) -> fx.Node:
    args = list(part.args)
    if args[3] is not None:
        args[3] = [int(args[0].meta["val"].shape[1])]
    if int(args[9]) > 1:
        args[9] = int(args[1].meta["val"].shape[1])
    return part.emit(part.node.target, *args, **part.kwargs)


def _pooling(node: fx.Node) -> Rule:
    """Each sample and channel by itself; without samples, each channel."""
    operands = operands_of(node)
    x = shape(operands[0])
    num_space = next(k for k in (1, 2, 3) if f"{k}d" in str(node.target))
    lead = ("n", "c")[2 - (len(x) - num_space) :]
    term: Term = tuple((name,) for name in lead) + ((),) * num_space
    results = tuple(() if r is None else term for r in results_of(node))
    linear = groups((0,)) if _is_linear(node) else ()
    sizes: dict[str, int] = dict(zip(lead, x, strict=False))
    return Rule((term,) * len(operands), results, sizes, linear=linear)


def _is_linear(node: fx.Node) -> bool:
    name = str(node.target)
    return "avg" in name or "backward" in name or "unpool" in name


def _fractional(node: fx.Node) -> Rule:
    """Pooling at random positions: an operand that gives them for each sample and channel."""
    x, places = (shape(o) for o in operands_of(node))
    num_space = places[-1]
    space, out = (" ".join(f"{s}{i}!" for i in range(num_space)) for s in "io")
    lead, places_lead = ("n c", "n c") if len(x) == num_space + 2 else ("c", "1 c")
    text = f"{lead} {space}, {places_lead} xy! -> {lead} {out}, {lead} {out}"
    return spelled(text)(node)


def _windows(node: fx.Node) -> Rule:
    """im2col and col2im: the windows of a channel are adjacent, channel by channel."""
    x, out = shape(node.args[0]), shape(node)
    image = max(x, out, key=len)
    n = "n " if len(image) == 4 else ""
    left, right = f"{n}c y! x!", f"{n}(c k!) l!"
    text = f"{left} -> {right}" if image is x else f"{right} -> {left}"
    return spelled(text, sizes={"c": image[-3]}, linear=groups((0,)))(node)


RULES = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _pooling,
    aten.max_pool2d_with_indices_backward.default: _pooling,
    aten.avg_pool2d.default: _pooling,
    aten.avg_pool2d_backward.default: _pooling,
    aten._adaptive_avg_pool2d.default: _pooling,
    aten._adaptive_avg_pool2d_backward.default: _pooling,
    aten.max_pool3d_with_indices.default: _pooling,
    aten.max_pool3d_with_indices_backward.default: _pooling,
    aten.avg_pool3d.default: _pooling,
    aten.avg_pool3d_backward.default: _pooling,
    aten.adaptive_max_pool2d.default: _pooling,
    aten.adaptive_max_pool2d_backward.default: _pooling,
    aten._adaptive_avg_pool3d.default: _pooling,
    aten._adaptive_avg_pool3d_backward.default: _pooling,
    aten.adaptive_max_pool3d.default: _pooling,
    aten.adaptive_max_pool3d_backward.default: _pooling,
    aten.max_unpool2d.default: _pooling,
    aten.max_unpool3d.default: _pooling,
    aten.fractional_max_pool2d.default: _fractional,
    aten.fractional_max_pool2d_backward.default: _pooling,
    aten.fractional_max_pool3d.default: _fractional,
    aten.fractional_max_pool3d_backward.default: _pooling,
    aten.im2col.default: _windows,
    aten.col2im.default: _windows,
}
