"""Resized or warped images: samples and channels split, the image's own positions stay whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, shape, spelled

aten = torch.ops.aten
_ONE = groups((0,))


def _resized(node: fx.Node, **options: Any) -> Rule:
    """Each sample and channel by itself."""
    n, c, *space = shape(node)
    term: Term = (("n",), ("c",), *((),) * len(space))
    return Rule((term,), (term,), {"n": n, "c": c}, linear=_ONE, **options)


# A backward takes the shape of the image as an argument.
_resized_backward = partial(_resized, shape_argument=2)


def _grid_terms(node: fx.Node, at: int) -> tuple[str, str, str]:
    """Terms of the image, the grid, and the values read at its points; the image is argument `at`."""
    num_space = len(shape(node.args[at])) - 2
    space = " ".join(f"s{i}!" for i in range(num_space))
    points = " ".join(f"p{i}" for i in range(num_space))
    return f"n c {space}", f"n {points} xy!", f"n c {points}"


def _grid_sample(node: fx.Node) -> Rule:
    """Every point reads anywhere in its own image: points split as well."""
    image, grid, read = _grid_terms(node, 0)
    return spelled(f"{image}, {grid} -> {read}", linear=_ONE)(node)


def _grid_sample_backward(node: fx.Node) -> Rule:
    """The image's gradient is a sum over points, the grid's a sum over channels."""
    image, grid, read = _grid_terms(node, 1)
    return spelled(f"{read}, {image}, {grid} -> {image}, {grid}", linear=_ONE)(node)


def _affine_grid(node: fx.Node) -> Rule:
    """A grid for each matrix; the number of matrices is an argument, too."""
    theta, grid = shape(node.args[0]), shape(node)
    term: Term = (("n",), *((),) * (len(grid) - 1))
    parts = {"n": _affine_grid_part}
    return Rule((term[:3],), (term,), {"n": theta[0]}, linear=_ONE, parts=parts)


def _affine_grid_part(part: Any) -> fx.Node:
    theta, size, *rest = part.args
    num_local = int(theta.meta["val"].shape[0])
    return part.emit(part.node.target, theta, [num_local, *size[1:]], *rest, **part.kwargs)


_RESIZED = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    **{getattr(aten, name).default: _resized for name in _RESIZED},
    **{getattr(aten, f"{name}_backward").default: _resized_backward for name in _RESIZED},
    aten.grid_sampler_2d.default: _grid_sample,
    aten.grid_sampler_2d_backward.default: _grid_sample_backward,
    aten.grid_sampler_3d.default: _grid_sample,
    aten.grid_sampler_3d_backward.default: _grid_sample_backward,
    aten.affine_grid_generator.default: _affine_grid,
}
