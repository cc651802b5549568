"""Images at another resolution or warped: samples and channels split, what is read from stays whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, operands_of, parse_rule, results_of, shape

aten = torch.ops.aten
_ONE = groups((0,))


def _resized(node: fx.Node) -> Rule:
    """Each sample and channel by itself."""
    x = shape(node.args[0])
    term: Term = (("n",), ("c",), *((),) * (len(x) - 2))
    return Rule((term,), (term,), {"n": x[0], "c": x[1]}, linear=_ONE)


def _resized_backward(node: fx.Node) -> Rule:
    """As forward; the shape of the image is an argument."""
    x = shape(node)
    term: Term = (("n",), ("c",), *((),) * (len(x) - 2))
    return Rule((term,), (term,), {"n": x[0], "c": x[1]}, linear=_ONE, shape_argument=2)


def _grid_terms(node: fx.Node, at: int) -> tuple[str, str, str]:
    """Image, grid and what is read at the grid's points; the image is argument `at`."""
    num_space = len(shape(node.args[at])) - 2
    space = " ".join(f"s{i}!" for i in range(num_space))
    points = " ".join(f"p{i}" for i in range(num_space))
    return f"n c {space}", f"n {points} xy!", f"n c {points}"


def _grid_sample(node: fx.Node) -> Rule:
    """Every point reads anywhere in its own image: points split as well."""
    image, grid, read = _grid_terms(node, 0)
    operands = [shape(x) for x in operands_of(node)]
    return parse_rule(f"{image}, {grid} -> {read}", operands, [shape(node)], linear=_ONE)


def _grid_sample_backward(node: fx.Node) -> Rule:
    """The image's gradient is a sum over points, the grid's a sum over channels."""
    image, grid, read = _grid_terms(node, 1)
    operands = [shape(x) for x in operands_of(node)]
    results = [None if r is None else tuple(r.shape) for r in results_of(node)]
    text = f"{read}, {image}, {grid} -> {image}, {grid}"
    return parse_rule(text, operands, results, linear=_ONE)


def _affine_grid(node: fx.Node) -> Rule:
    """A grid for each matrix; the number of matrices is an argument as well."""
    theta, grid = shape(node.args[0]), shape(node)
    term: Term = (("n",), *((),) * (len(grid) - 1))
    parts = {"n": _affine_grid_part}
    return Rule((term[:3],), (term,), {"n": theta[0]}, linear=_ONE, parts=parts)


def _affine_grid_part(part: Any) -> fx.Node:
    theta, size, *rest = part.args
    num_local = int(theta.meta["val"].shape[0])
    return part.emit(part.node.target, theta, [num_local, *size[1:]], *rest, **part.kwargs)


RULES = {
    aten.upsample_nearest1d.default: _resized,
    aten.upsample_nearest1d_backward.default: _resized_backward,
    aten.upsample_nearest2d.default: _resized,
    aten.upsample_nearest2d_backward.default: _resized_backward,
    aten.upsample_nearest3d.default: _resized,
    aten.upsample_nearest3d_backward.default: _resized_backward,
    aten._upsample_nearest_exact1d.default: _resized,
    aten._upsample_nearest_exact1d_backward.default: _resized_backward,
    aten._upsample_nearest_exact2d.default: _resized,
    aten._upsample_nearest_exact2d_backward.default: _resized_backward,
    aten._upsample_nearest_exact3d.default: _resized,
    aten._upsample_nearest_exact3d_backward.default: _resized_backward,
    aten.upsample_linear1d.default: _resized,
    aten.upsample_linear1d_backward.default: _resized_backward,
    aten.upsample_bilinear2d.default: _resized,
    aten.upsample_bilinear2d_backward.default: _resized_backward,
    aten.upsample_trilinear3d.default: _resized,
    aten.upsample_trilinear3d_backward.default: _resized_backward,
    aten.upsample_bicubic2d.default: _resized,
    aten.upsample_bicubic2d_backward.default: _resized_backward,
    aten._upsample_bilinear2d_aa.default: _resized,
    aten._upsample_bilinear2d_aa_backward.default: _resized_backward,
    aten._upsample_bicubic2d_aa.default: _resized,
    aten._upsample_bicubic2d_aa_backward.default: _resized_backward,
    aten.grid_sampler_2d.default: _grid_sample,
    aten.grid_sampler_2d_backward.default: _grid_sample_backward,
    aten.grid_sampler_3d.default: _grid_sample,
    aten.grid_sampler_3d_backward.default: _grid_sample_backward,
    aten.affine_grid_generator.default: _affine_grid,
}
