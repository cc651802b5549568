"""Scratch memory of a collective, and which of its results lie in one piece.

Joined collectives pack the tensors of a dtype into one tensor, move it, and take the result apart:

    all_reduce       [x y] packed -> [X Y]            the results are views of one tensor
    reduce_scatter   [x y] packed -> [X Y]            as well
    all_gather       [x y] packed -> rows [n, x y]    each result is a copy out of the rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.known_calls import called
from tutti.graph.ops import collectives
from tutti.torch_private.fake_tensors import FakeTensorMode, empty_fake

# The note of a collective that Gloo does not carry: what carries it.
CARRIED_BY = "carried_by"
MEMORY, GPUS = "memory", "gpus"
# The note of a `start`, and of an input under way since another part: the values at its end.
BEGUN = "begun"
_SEVERAL = (collectives.together, collectives.start)


def results_in(node: fx.Node, mode: FakeTensorMode) -> list[Tensor]:
    """Fakes of the results of a `together`, or of those that a `start` begins to write.

    A reduction of several tensors has one piece of memory for each dtype.
    """
    vals = node.meta[BEGUN] if node.target is collectives.start else node.meta["val"]
    made = [empty_fake(mode, tuple(x.shape), x.dtype, x.device) for x in vals]
    if len(vals) < 2 or node.args[0] not in ("all_reduce", "reduce_scatter"):
        return made
    for chosen in _by_dtype(vals):
        shapes = [tuple(vals[i].shape) for i in chosen]
        first = vals[chosen[0]]
        numel = sum(math.prod(shape) for shape in shapes)
        whole = empty_fake(mode, (numel,), first.dtype, first.device)
        for i, x in zip(chosen, called(mode, _taken_apart, (whole, shapes), {}), strict=True):
            made[i] = x
    return made


def _taken_apart(whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = whole.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def is_move(node: fx.Node) -> bool:
    """Whether `node` is a collective whose results are new tensors."""
    return node.target in _SEVERAL or node.target in collectives.COLLECTIVES


def is_of_gpus(node: fx.Node) -> bool:
    """Whether a collective is one of a plan for GPUs.

    Packed copies count on processors only, where their bytes have been measured.
    """
    return node.meta.get(CARRIED_BY) == GPUS


def borrowed_by_move(node: fx.Node, operands: tuple[Any, ...], result: Any) -> int:
    """Bytes of scratch memory that a collective (`is_move`) holds while it runs."""
    if node.target in _SEVERAL:
        if is_of_gpus(node):
            return 0
        kind, xs, _, wheres, _ = operands
        results = result
    else:
        kind = node.target.__name__  # type: ignore[union-attr]
        xs, wheres, results = [operands[0]], [operands[2:]], [result]
    if is_of_gpus(node):
        return _of_gpus(kind, xs, wheres, results)
    through_gloo = CARRIED_BY not in node.meta and results[0].device.type == "cpu"
    return _OF_KIND[kind](xs, wheres, results, through_gloo)


def _all_reduce(
    xs: Sequence[Tensor], wheres: Any, results: Sequence[Tensor], through_gloo: bool
) -> int:
    if len(xs) == 1:  # Gloo reduces a copy, which is the result
        return 0 if through_gloo else _laid_out(xs[0], 0)
    copies = sum(_laid_out(x, 0) for x in xs)
    return copies + _in_turn([(_nbytes(xs, i), _nbytes(results, i)) for i in _by_dtype(xs)])


def _reduce_scatter(
    xs: Sequence[Tensor], wheres: Any, results: Sequence[Tensor], through_gloo: bool
) -> int:
    """The parts to send, and through Gloo those received, before their sum."""
    copies = sum(_laid_out(x, *where[:2]) for x, where in zip(xs, wheres, strict=True))
    received = 1 if through_gloo else 0
    if len(xs) == 1:
        return copies + received * xs[0].nbytes
    turns = [((1 + received) * _nbytes(xs, i), _nbytes(results, i)) for i in _by_dtype(xs)]
    return copies + _in_turn(turns)


def _all_gather(
    xs: Sequence[Tensor], wheres: Any, results: Sequence[Tensor], through_gloo: bool
) -> int:
    """Gloo's own buffer, then the parts in rank order, unless these are the result."""
    copies = sum(_laid_out(x, 0) for x in xs)
    turns, rows = [], 0
    for chosen in _by_dtype(xs):
        packed = _nbytes(xs, chosen) if len(xs) > 1 else 0
        gathered = _nbytes(results, chosen)
        turns.append((packed + (gathered if through_gloo else 0), gathered))
        first = len(chosen) == 1 and tuple(wheres[chosen[0]]) == (0, 1)
        rows += 0 if first else gathered
    return copies + max(_in_turn(turns), rows)


def _all_to_all(
    xs: Sequence[Tensor], wheres: Any, results: Sequence[Tensor], through_gloo: bool
) -> int:
    found = 0
    for x, (split_dim, split_outer, cat_dim, cat_outer), y in zip(xs, wheres, results, strict=True):
        joined = 0 if cat_dim == 0 and cat_outer == 1 else y.nbytes
        found += _laid_out(x, split_dim, split_outer) + joined
    return found


def _of_gpus(kind: str, xs: Sequence[Tensor], wheres: Any, results: Sequence[Tensor]) -> int:
    if kind == "reduce_scatter":
        return _laid_out(xs[0], *wheres[0][:2]) + xs[0].nbytes
    return 0 if kind == "all_reduce" else _OF_KIND[kind](xs, wheres, results, False)


_OF_KIND = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _laid_out(x: Tensor, dim: int, outer: int = 1) -> int:
    """A copy with adjacent parts, where those of `x` are not adjacent."""
    return 0 if dim == 0 and outer == 1 and x.is_contiguous() else x.nbytes


def _by_dtype(xs: Sequence[Tensor]) -> list[list[int]]:
    """The positions of the tensors of each dtype, in the order in which they move."""
    found: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        found.setdefault(x.dtype, []).append(i)
    return list(found.values())


def _nbytes(xs: Sequence[Tensor], chosen: Sequence[int]) -> int:
    return sum(xs[i].nbytes for i in chosen)


def _in_turn(turns: Sequence[tuple[int, int]]) -> int:
    """The most bytes beyond all results, if each turn borrows the first bytes and leaves the second."""
    left = highest = 0
    for borrowed, result in turns:
        left += result
        highest = max(highest, left + borrowed)
    return highest - left
