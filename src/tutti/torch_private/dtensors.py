"""The inside of a `DTensor`: this rank's part and the spec, without autograd and without copies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.torch_private.dispatch_modes import (
    TorchDispatchMode,
    no_torch_function,
    not_overridden,
)
from tutti.torch_private.pytrees import tree_leaves

# `local_part(x)`: the tensor that a `DTensor` holds on this rank. Why: each call of a step reads it.
# Public: `to_local`, which makes an autograd node and a new view at each call.
local_part: Callable[[Any], Tensor] = attrgetter("_local_tensor")

# `spec_of(x)`: mesh, placements, and global shape, stride and dtype. Why: to make shards from shards at no
# cost. Public: `DTensor.from_local`, which makes an autograd node and computes all of them again.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


_LOG = logging.getLogger("torch.distributed.tensor._redistribute")


@contextmanager
def without_advice() -> Iterator[None]:
    """Gather without PyTorch's advice to flatten the mesh, once a rank.

    Why: the user has not made the mesh, and cannot follow it. Public: none.
    """
    _LOG.addFilter(_is_no_advice)
    try:
        yield
    finally:
        _LOG.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("While redistributing from")


def local_parts(tensors: Sequence[Tensor], lie: Sequence[bool]) -> list[Tensor]:
    """The tensors, with the `local_part` of those marked by `lie`; tensors beyond the marks stay unchanged.

    Why: as `local_part`, in a loop without calls. Public: as there.
    """
    marked = zip(tensors, chain(lie, repeat(False)), strict=False)
    return [x._local_tensor if lies else x for x, lies in marked]  # type: ignore[attr-defined]


def set_local_part(x: Any, part: Tensor) -> None:
    """Let a `DTensor` hold another tensor on this rank.

    Why: state moves while users keep its tensor. Public: none.
    """
    x._local_tensor = part


def made_of(kind: type, part: Tensor, spec: Any, *, requires_grad: bool = False) -> Any:
    """A `DTensor`, or one of a subclass, around this rank's part, without a check or a copy.

    Why: as `spec_of`. Public: as there.
    """
    return kind(part, spec, requires_grad=requires_grad)


def spec_with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """The same spec of a tensor of another dtype.

    Why: as `spec_of`. Public: as there.
    """
    meta = spec.tensor_meta._replace(dtype=dtype)
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta)


class _AskingClass(TorchDispatchMode):
    """Asks the class of an `AnsweringDTensor` for each op on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        found = next((type(x) for x in given if isinstance(x, AnsweringDTensor)), None)
        if found is None:
            return func(*args, **(kwargs or {}))
        return found.__torch_dispatch__(func, types, args, kwargs)


def _is_asked() -> bool:
    """Whether PyTorch asks a `DTensor`'s class for each op; 2.11 does not, and its `DTensor` shows it."""
    try:
        DTensor.__torch_dispatch__(lambda: None, ())
    except NotImplementedError:
        return False
    return True


class AnsweringDTensor(DTensor):
    """A `DTensor` whose class answers each op by its `__torch_dispatch__`; it overrides no functions.

    Why: PyTorch 2.11 runs the ops of every `DTensor` in C++, and asks no subclass. There each function called
    with one runs in a mode that asks. Public: `__torch_dispatch__` alone, as PyTorch 2.13 reads it.
    """

    __slots__ = ()

    if _is_asked():
        __torch_function__ = not_overridden
    else:

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with no_torch_function(), _AskingClass():
                return func(*args, **(kwargs or {}))
