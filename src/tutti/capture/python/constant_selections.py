"""Selections by constants: the number of their elements is known in a trace.

    mask = ~torch.eye(4, dtype=torch.bool)
    sim[mask]      ->  sim[rows, columns], positions of `nonzero_static(mask, size=12)`

The graph computes the positions in each call, as eager does: no graph holds them. A mask that picks as many
elements in each row is a lookup in each row, so that rows can be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.known_values import MOST_NUMBERS, UNKNOWN, is_too_large, known
from tutti.capture.python.ways_out import of_stack
from tutti.errors import CaptureError
from tutti.torch_private.pytrees import tree_map_only

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _nonzero(x: Tensor) -> Any:
    size = _known(x, lambda values: int(values.count_nonzero()))
    return NotImplemented if size is UNKNOWN else aten.nonzero_static.default(x, size=size)


def _masked_select(x: Tensor, mask: Tensor) -> Any:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    places = _places(x.expand(shape), [mask.expand(shape)])
    return (
        NotImplemented
        if places is None
        else places.flat(aten.index(x.expand(shape), places.indices))
    )


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    places = _places(x, [mask.expand(x.shape)])
    if places is None:
        return NotImplemented
    picked = places.indices[-1].numel()
    if source.numel() < picked:
        return NotImplemented  # PyTorch's own error
    values = source.reshape(-1)[:picked]
    return aten.index_put(x, places.indices, places.split(values, 1))


def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Any:
    places = _places(grad, [mask.expand(grad.shape)])
    if places is None:
        return NotImplemented
    found = places.flat(aten.index(grad, places.indices))
    rest = grad.new_zeros(math.prod(sizes) - found.numel())
    return torch.cat([found, rest]).view(sizes)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    places = _places(x, indices)
    return NotImplemented if places is None else places.flat(aten.index(x, places.indices))


def _put(op: Callable[..., Any]) -> Callable[..., Any]:
    def put(
        x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *options: Any, **named: Any
    ) -> Any:
        places = _places(x, indices)
        if places is None:
            return NotImplemented
        behind = x.dim() - places.before - places.mask_dims
        return op(x, places.indices, places.split(values, 1 + behind), *options, **named)

    return put


class _Places:
    """Indices with positions in place of masks.

    Attributes:
        indices: integer tensors, or None for a whole dim.
        before: the number of dims of the result before those of the indices, for a lookup in rows.
        mask_dims: the number of dims of the mask, for a lookup in rows.
        rows: the shape of the indices of a lookup in rows: two dims, which are one of the result.
    """

    def __init__(
        self,
        indices: list[Tensor | None],
        before: int = 0,
        mask_dims: int = 0,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.indices: list[Any] = indices
        self.before, self.mask_dims, self.rows = before, mask_dims, rows

    def flat(self, found: Tensor) -> Tensor:
        """The result of the lookup with the dims of the indices as one."""
        return found if self.rows is None else found.flatten(self.before, self.before + 1)

    def split(self, values: Tensor, dims: int) -> Tensor:
        """Values to write, with two dims for the one of the positions, `dims` from the end."""
        if self.rows is None or values.dim() < dims:
            return values
        at = values.dim() - dims
        return values.unsqueeze(at) if values.shape[at] == 1 else values.unflatten(at, self.rows)


def _places(x: Tensor, indices: Sequence[Tensor | None]) -> _Places | None:
    """Known positions in place of masks; None without a mask, or for one that is not known."""
    masks = [i for i in indices if i is not None and i.dtype in _MASKS]
    if not masks or not all(mask.dim() for mask in masks):
        return None
    _check(x, indices)
    if len(masks) == len([i for i in indices if i is not None]) == 1:
        return _of_rows(indices) or _positions(indices)
    return _positions(indices)


def _check(x: Tensor, indices: Sequence[Tensor | None]) -> None:
    """PyTorch's own error for a mask of another shape; positions would pass."""
    at = 0
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            at += 1
            continue
        if index.shape != x.shape[at : at + index.dim()]:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {at} does not match the shape of the "
                f"indexed tensor {list(x.shape)}"
            )
        at += index.dim()


def _positions(indices: Sequence[Tensor | None]) -> _Places | None:
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        if (places := _nonzero(index)) is NotImplemented:
            return None
        found += places.unbind(1)
    return _Places(found)


def _of_rows(indices: Sequence[Tensor | None]) -> _Places | None:
    """The only mask as a lookup in each row, if it picks as many elements of each; at least one."""
    before, mask = next((k, i) for k, i in enumerate(indices) if i is not None)
    if mask.dim() < 2 or not mask.numel():
        return None
    counts = _known(mask, lambda values: values.flatten(1).count_nonzero(1).unique().tolist())
    if counts is UNKNOWN or len(counts) != 1 or not counts[0]:
        return None
    rows = mask.shape[0], counts[0]
    columns = aten.nonzero_static.default(mask, size=math.prod(rows)).unflatten(0, rows)
    first = torch.arange(rows[0], device=mask.device).unsqueeze(1)
    given = [*indices[:before], first, *columns.unbind(2)[1:], *indices[before + 1 :]]
    return _Places(given, before, mask.dim(), rows)


def _of_values(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op whose results are constants of the graph if its operand is one."""

    def made(x: Tensor, *args: Any, **options: Any) -> Any:
        found = _known(x, lambda values: op(values, *args, **options))
        if found is UNKNOWN:
            return NotImplemented
        return tree_map_only(Tensor, lambda values: _literal(values, x.device), found)

    return made


def _literal(values: Tensor, device: torch.device) -> Tensor:
    return torch.tensor(values.tolist(), dtype=values.dtype, device=device)


def _known(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    found = known(x, read)
    if found is UNKNOWN and is_too_large(x):
        told = of_stack("a mask and torch.where instead of selecting elements")
        raise CaptureError(
            f"the step selects elements by constants of more than {MOST_NUMBERS:,} numbers",
            at=told.at,
            why="every shape must be known before the step runs, and capture computes no larger constants"
            + told.inside,
            fix=told.fix,
        )
    return found


# In the form of `make_fx`'s decompositions: they apply below autograd, to gradients as well.
SELECTIONS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.index.Tensor: _index,
    **{
        op: _put(op)
        for op in (
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
        )
    },
    **{
        op: _of_values(op)
        for op in (
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
            aten.unique_dim_consecutive.default,
            aten.repeat_interleave.Tensor,
        )
    },
}
