"""The parts of a fused product, as the rows of a dim of parts.

    %2 = slice(%1, 2, 0, 64)           %2 = reshape(%1, [8, 16, 3, 64])
    %3 = slice(%1, 2, 64, 128)    ->   %3 = select(%2, 2, 0)
    %4 = slice(%1, 2, 128, 192)        %4 = select(%2, 2, 1), ...

One product often computes several values: queries, keys and values; a gate and its factor; the shift, scale
and gate of an adaptive norm. A slice needs its dim whole. A dim of three parts of 64 may be split within each
part, `3*64@tensor`: each rank has its share of every part, such as some heads. So slices that cut the result
of a product, or a parameter, in equal parts become views of a dim of parts. Their gradients are concatenated
along it; autograd may write the same as a sum of gradients with zeros around. Values stay the same, and no
view has memory of its own.

Parts are equal, or one and two thirds of the dim: an attention between two sequences cuts its weight so.
Other slices stay: 8 heads of keys and 32 of queries are not split within equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from tutti.capture.spelling.rewrites import shape_list
from tutti.graph.edits.edit import Editor, Emit

aten = torch.ops.aten
# The most parts of one size that unequal cuts may have.
_FEW = 3


# The shape of a fused product, the dim of its parts, and the size of a part.
Fused = tuple[tuple[int, ...], int, int]


def part_fused_products(editor: Editor) -> None:
    """Rewrite the slices of fused products, and the concatenations of their gradients."""
    parted: set[Fused] = set()
    nodes = list(editor.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.target is aten.cat.default:
            _join(editor, node, parted)
            continue
        if node.target is aten.add.Tensor:
            _join_terms(editor, node, parted)
        for dim, slices in _slices(node).items():
            _part(editor, node, dim, sorted(slices, key=order.__getitem__), parted)


def _slices(x: fx.Node) -> dict[int, list[fx.Node]]:
    """The slices of `x` without a step, by dim."""
    found: dict[int, list[fx.Node]] = {}
    for user in x.users:
        if user.target is aten.slice.Tensor and user.args[0] is x and len(user.args) < 5:
            rank = len(shape_list(x))
            dim: Any = user.args[1] if len(user.args) > 1 else 0
            found.setdefault(dim % rank, []).append(user)
    return found


def _part(
    editor: Editor, x: fx.Node, dim: int, slices: Sequence[fx.Node], parted: set[Fused]
) -> None:
    """Rewrite the slices of `x` along `dim`, if it is a fused product, and note it."""
    shape = shape_list(x)
    size = shape[dim]
    bounds = [_bounds(s, size) for s in slices]
    unit = _unit([b for pair in bounds for b in pair], size)
    if unit is None or not _is_product(x, dim):
        return
    parted.add((tuple(shape), dim, unit))
    parts: dict[str, fx.Node] = {}
    for node, (start, end) in zip(slices, bounds, strict=True):
        emit = editor.at(node)
        region = node.meta.get("region", "")
        if region not in parts:
            parts[region] = emit(aten.reshape.default, x, _parted(shape, dim, unit))
        if end - start == unit:
            editor.replace(node, emit(aten.select.int, parts[region], dim, start // unit))
            continue
        few = emit(aten.slice.Tensor, parts[region], dim, start // unit, end // unit)
        editor.replace(node, emit(aten.reshape.default, few, shape_list(node)))


def _join(editor: Editor, node: fx.Node, parted: Collection[Fused]) -> None:
    """Rewrite the concatenation of the gradients of a fused product's parts."""
    given: Any = node.args
    shape = shape_list(node)
    dim = (given[1] if len(given) > 1 else 0) % len(shape)
    if any(len(shape_list(x)) != len(shape) for x in given[0]):
        return
    ends = [0, *accumulate(shape_list(x)[dim] for x in given[0])]
    unit = _unit(ends, shape[dim])
    if (tuple(shape), dim, unit) in parted and node.meta.get("region") == "backward":
        editor.replace(node, _joined(editor.at(node), given[0], shape, dim, unit))


def _joined(
    emit: Emit, parts: Iterable[fx.Node], shape: list[int], dim: int, unit: int | None
) -> fx.Node:
    """The concatenation of `parts` to `shape`, along a dim of parts of size `unit`."""
    assert unit is not None
    rows = [emit(aten.reshape.default, x, _parted(shape_list(x), dim, unit)) for x in parts]
    return emit(aten.reshape.default, emit(aten.cat.default, rows, dim), shape)


def _join_terms(editor: Editor, node: fx.Node, parted: Collection[Fused]) -> None:
    """Rewrite a sum of the gradients of all slices of a fused product, and of at most one more term.

    At each position one slice alone adds more than zero, so any order of the terms gives the same sum.
    """
    if node.meta.get("region") != "backward" or any(map(_is_sum, node.users)):
        return
    terms = list(_terms(node))
    padded: list[Any] = [x for x in terms if _is_padded(x)]
    shape = shape_list(node)
    dims = {x.args[2] % len(shape) for x in padded}
    others = [x for x in terms if x not in padded]
    if len(dims) != 1 or len(padded) < 2 or len(others) > 1:
        return
    (dim,) = dims
    bounds = {x: _bounds(x, shape[dim]) for x in padded}
    padded.sort(key=bounds.__getitem__)
    ends = [0, *(bounds[x][1] for x in padded)]
    unit = _unit(ends, shape[dim])
    tiled = ends[:-1] == [bounds[x][0] for x in padded] and ends[-1] == shape[dim]
    dtypes = {x.meta["val"].dtype for x in (node, *terms)}
    if not tiled or len(dtypes) > 1 or (tuple(shape), dim, unit) not in parted:
        return
    emit = editor.at(node)
    made = _joined(emit, [x.args[0] for x in padded], shape, dim, unit)
    editor.replace(node, emit(aten.add.Tensor, made, others[0]) if others else made)


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two values of its own shape."""
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(x, fx.Node) and shape_list(x) == shape_list(node) for x in node.args)
    )


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """The terms of a sum of sums that nothing else reads."""
    given: Any = node.args if _is_sum(node) else ()
    for x in given:
        if _is_sum(x) and len(x.users) == 1:
            yield from _terms(x)
        else:
            yield x


def _is_padded(x: fx.Node) -> bool:
    """Whether a term is the gradient of a slice without a step, with zeros around it."""
    return x.target is aten.slice_backward.default and x.args[5] == 1 and len(x.users) == 1  # type: ignore[return-value]


def _bounds(node: fx.Node, size: int) -> tuple[int, int]:
    """The places where a slice, or the gradient of one, begins and ends along its dim of `size`."""
    given: Any = node.args
    at = 3 if node.target is aten.slice_backward.default else 2
    start, end, _ = slice(*given[at : at + 2]).indices(size)
    return start, end


def _unit(cuts: Iterable[int], size: int) -> int | None:
    """The size of a part, for a dim cut at these places; None if its parts are of too different sizes."""
    ends = sorted({0, size, *cuts})
    sizes = [b - a for a, b in pairwise(ends)]
    unit = math.gcd(*sizes)
    is_fused = len(sizes) > 1 and unit > 1 and (len(set(sizes)) == 1 or size // unit <= _FEW)
    return unit if is_fused else None


def _parted(shape: Sequence[int], dim: int, unit: int) -> list[int]:
    return [*shape[:dim], shape[dim] // unit, unit, *shape[dim + 1 :]]


def _is_product(x: fx.Node, dim: int) -> bool:
    """Whether `dim` of `x` is the columns of a product, the channels of a convolution, or a parameter's."""
    size = shape_list(x)[dim]
    node: Any = x
    while isinstance(node, fx.Node):
        shape, given = shape_list(node), node.args
        columns = dim == len(shape) - 1
        match node.target:
            case _ if node.meta.get("kind") == "parameter":
                return True
            case aten.convolution.default:
                return dim == 1
            case aten.mm.default | aten.bmm.default | aten.addmm.default:
                return columns
            case aten._to_copy.default:
                node = given[0]
            case aten.permute.default:
                dim, node = given[1][dim], given[0]  # type: ignore[index, assignment]
            case aten.reshape.default if columns:
                node, dim = given[0], len(shape_list(given[0])) - 1
            case aten.add.Tensor if columns and not node.kwargs:
                node = _without_bias(given, shape)
            case _:
                return False
        if not isinstance(node, fx.Node) or shape_list(node)[dim : dim + 1] != [size]:
            return False
    return False


def _without_bias(terms: Sequence[Any], shape: Sequence[int]) -> fx.Node | None:
    """The other term of the sum with a bias."""
    full = [y for y in terms if isinstance(y, fx.Node) and shape_list(y) == shape]
    bias = [y for y in terms if isinstance(y, fx.Node) and shape_list(y) == shape[-1:]]
    return full[0] if len(full) == len(bias) == 1 else None
