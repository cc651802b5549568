"""Normalization layers: the normalized dims stay whole, or the op is decomposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, operands_of, results_of, shape

aten = torch.ops.aten


def _layer_terms(
    x: tuple[int, ...], num_normalized: int
) -> tuple[Term, Term, Term, dict[str, int], set[str]]:
    """Terms of the input, of the statistics and of the weight."""
    lead = len(x) - num_normalized
    full: Term = tuple((f"d{i}",) for i in range(len(x)))
    stats: Term = tuple((f"d{i}",) if i < lead else () for i in range(len(x)))
    return (
        full,
        stats,
        full[lead:],
        {f"d{i}": n for i, n in enumerate(x)},
        {f"d{i}" for i in range(lead, len(x))},
    )


def _layer_norm(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    normalized: Any = node.args[1]
    full, stats, weight, sizes, whole = _layer_terms(x, len(normalized))
    operands = (full,) + (weight,) * (len(operands_of(node)) - 1)
    return Rule(operands, (full, stats, stats), sizes, frozenset(whole))


def _rms_norm(node: fx.Node) -> Rule:
    x = shape(node.args[0])
    normalized: Any = node.args[1]
    full, stats, weight, sizes, whole = _layer_terms(x, len(normalized))
    operands = (full,) + (weight,) * (len(operands_of(node)) - 1)
    return Rule(operands, (full, stats), sizes, frozenset(whole))


def _rms_norm_backward(node: fx.Node) -> Rule:
    x = shape(node.args[1])
    normalized: Any = node.args[2]
    full, stats, weight, sizes, whole = _layer_terms(x, len(normalized))
    operands = (full, full, stats) + (weight,) * (len(operands_of(node)) - 3)
    results = tuple(
        () if r is None else t for r, t in zip(results_of(node), (full, weight), strict=True)
    )
    return Rule(operands, results, sizes, frozenset(whole), linear=groups((0,)))


def _layer_norm_backward(node: fx.Node) -> Rule:
    x = shape(node.args[1])
    normalized: Any = node.args[2]
    full, stats, weight, sizes, whole = _layer_terms(x, len(normalized))
    operands = (full, full, stats, stats) + (weight,) * (len(operands_of(node)) - 4)
    results = tuple(
        () if r is None else t
        for r, t in zip(results_of(node), (full, weight, weight), strict=True)
    )
    return Rule(operands, results, sizes, frozenset(whole), linear=groups((0,)))


def _channel_terms(x: tuple[int, ...]) -> tuple[Term, dict[str, int], frozenset[str]]:
    """Batch, channel and space of a batch norm's input; all but the channels stay whole in training."""
    term: Term = tuple((f"d{i}",) for i in range(len(x)))
    return (
        term,
        {f"d{i}": n for i, n in enumerate(x)},
        frozenset(f"d{i}" for i in range(len(x)) if i != 1),
    )


_C: Term = (("d1",),)


def _per_channel(x: Any) -> Term:
    """The term of statistics; empty where an evaluation saves none."""
    return _C if x.numel() else ((),)


def _batch_norm(node: fx.Node) -> Rule:
    term, sizes, whole = _channel_terms(shape(node.args[0]))
    training = bool(node.args[5])
    operands = (term,) + (_C,) * (len(operands_of(node)) - 1)
    first, *stats = results_of(node)
    assert first is not None
    results = (term, *(() if r is None else _per_channel(r) for r in stats))
    # Only training computes statistics from split values; otherwise they are inputs, equal on all ranks.
    apart = frozenset() if training else frozenset(range(1, len(results)))
    return Rule(operands, results, sizes, whole if training else frozenset(), apart=apart)


def _batch_norm_backward(node: fx.Node) -> Rule:
    term, sizes, whole = _channel_terms(shape(node.args[1]))
    stats = operands_of(node)[2:]
    operands = (term, term, *(_per_channel(x.meta["val"]) for x in stats))
    results = tuple(
        () if r is None else t for r, t in zip(results_of(node), (term, _C, _C), strict=True)
    )
    training = bool(node.args[7])
    linear = groups((0,))
    return Rule(operands, results, sizes, whole if training else frozenset(), linear=linear)


def _group_terms(x: tuple[int, ...], num_groups: int) -> tuple[Term, Term, Term, dict[str, int]]:
    """Terms of the input, the statistics and the weight: samples and groups (runs of channels) split."""
    sizes = {"n": x[0], "g": num_groups, "c": x[1] // num_groups}
    channel = tuple(f for f in ("g", "c") if sizes[f] > 1)
    full: Term = (("n",), channel, *((),) * (len(x) - 2))
    return full, (("n",), channel[:1] if num_groups > 1 else ()), (channel,), sizes


def _group_norm(node: fx.Node) -> Rule:
    num_groups: Any = node.args[6]
    full, stats, weight, sizes = _group_terms(shape(node.args[0]), num_groups)
    operands = (full,) + (weight,) * (len(operands_of(node)) - 1)
    parts = dict.fromkeys(("n", *stats[1]), _group_norm_part(3))
    return Rule(operands, (full, stats, stats), sizes, frozenset("c"), parts=parts)


def _group_norm_backward(node: fx.Node) -> Rule:
    num_groups: Any = node.args[8]
    full, stats, weight, sizes = _group_terms(shape(node.args[1]), num_groups)
    operands = (full, full, stats, stats) + (weight,) * (len(operands_of(node)) - 4)
    results = tuple(
        () if r is None else t
        for r, t in zip(results_of(node), (full, weight, weight), strict=True)
    )
    parts = dict.fromkeys(("n", *stats[1]), _group_norm_part(5))
    return Rule(operands, results, sizes, frozenset("c"), linear=groups((0,)), parts=parts)


def _group_norm_part(first: int) -> Callable[[Any], fx.Node]:
    """The op on some samples and groups; their numbers begin at argument `first`."""

    def part(part: Any) -> fx.Node:
        args = list(part.args)
        samples, channels = map(int, args[0].meta["val"].shape[:2])
        of_group = args[first + 1] // args[first + 3]
        args[first], args[first + 1], args[first + 3] = samples, channels, channels // of_group
        return part.emit(part.node.target, *args, **part.kwargs)

    return part


def _weight_norm(node: fx.Node) -> Rule:
    """A weight's direction and norm, one norm per position along a dim."""
    v, dim = shape(node.args[0]), length_dim(node)
    full, length = _direction_terms(v, dim)
    whole = frozenset(f"d{i}" for i in range(len(v)) if i != dim)
    return Rule((full, length), (full, length), {f"d{i}": n for i, n in enumerate(v)}, whole)


def _weight_norm_backward(node: fx.Node) -> Rule:
    v, dim = shape(node.args[1]), length_dim(node)
    full, length = _direction_terms(v, dim)
    whole = frozenset(f"d{i}" for i in range(len(v)) if i != dim)
    sizes = {f"d{i}": n for i, n in enumerate(v)}
    operands = (full, full, length, length)
    return Rule(operands, (full, length), sizes, whole, linear=groups((0,)))


def length_dim(node: fx.Node) -> int:
    """The dim along which a weight has norms."""
    dims = [a for a in node.args if isinstance(a, int)]
    return dims[0] if dims else 0


def _direction_terms(v: tuple[int, ...], dim: int) -> tuple[Term, Term]:
    full: Term = tuple((f"d{i}",) for i in range(len(v)))
    return full, tuple((f"d{i}",) if i == dim else () for i in range(len(v)))


RULES = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
}
