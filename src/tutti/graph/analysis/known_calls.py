"""Calls of ops on fakes, for the memory of their results alone: a call equal to an earlier one does not run.

What an op does with memory depends on the forms of its operands, and on which of them share memory: it makes
new memory, or its result lies in that of an operand. Layers repeat, and so do graphs, of which a plan
compares many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from tutti.torch_private.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    fake_in,
    new_memory,
    under_modes,
)
from tutti.torch_private.quick_fakes import CONSTANTS
from tutti.torch_private.storages import memory_id

# Results of this many calls are known; then all are forgotten.
_MOST = 20_000


class _Result(NamedTuple):
    """A tensor among the results of a call.

    memory: the number of the operand in whose memory it lies; below zero that of memory which the call makes,
    of `nbytes`.
    """

    memory: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


# By call its result, with a `_Result` for each tensor.
_KNOWN: dict[Any, Any] = {}
_NONE = object()


class _UnknownKind(Exception):
    """An argument that two calls may share, and yet differ; or a result that is no tensor or constant."""


def called(
    mode: FakeTensorMode,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The value of `function(*args, **kwargs)`: fakes, in new memory or in that of operands.

    Args:
        mode: of the fakes.
        function: an op, or a function of ops that depends on its arguments alone.
        args: fakes and constants, in lists and tuples; kwargs: as well.
    """
    operands: list[Tensor] = []
    memory: dict[int, int] = {}
    try:
        own = _key(args, operands), _key(tuple(kwargs.items()), operands)
        shared = [memory.setdefault(memory_id(x), i) for i, x in enumerate(operands)]
        key = function, own, tuple(shared)
        known = _KNOWN.get(key, _NONE)
    except (_UnknownKind, TypeError):  # symbols have no hash
        return _run(mode, function, args, kwargs)
    if known is not _NONE and not under_modes():
        return _made(mode, known, operands, {})
    result = _run(mode, function, args, kwargs)
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    with contextlib.suppress(_UnknownKind):
        _KNOWN[key] = _read(result, memory)
    return result


def _run(mode: FakeTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    with mode, torch.no_grad():
        return function(*args, **kwargs)


def _key(x: Any, operands: list[Tensor]) -> Any:
    kind = type(x)
    if kind is FakeTensor:
        operands.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.is_conj(), x.is_neg()
    if isinstance(x, list | tuple):
        return isinstance(x, list), *(_key(y, operands) for y in x)
    if kind in CONSTANTS:
        return kind, x
    raise _UnknownKind


def _read(result: Any, memory: dict[int, int]) -> Any:
    """What to know of a result; `memory` has the numbers of the memory of operands, and of results so far."""
    if isinstance(result, list | tuple):
        return [_read(x, memory) for x in result]
    if type(result) is FakeTensor and not (result.is_conj() or result.is_neg()):
        number = memory.setdefault(memory_id(result), -1 - len(memory))
        offset: Any = result.storage_offset()
        form = tuple(result.shape), result.stride(), offset, result.dtype, result.device
        return _Result(number, result.untyped_storage().nbytes(), *form)
    if type(result) in CONSTANTS:
        return result
    raise _UnknownKind


def _made(
    mode: FakeTensorMode, known: Any, operands: list[Tensor], new: dict[int, UntypedStorage]
) -> Any:
    if type(known) is _Result:
        if known.memory >= 0:
            memory = operands[known.memory].untyped_storage()
        elif known.memory in new:
            memory = new[known.memory]
        else:
            memory = new[known.memory] = new_memory(known.nbytes)
        return fake_in(mode, memory, *known[2:])
    if isinstance(known, list):
        return [_made(mode, x, operands, new) for x in known]
    return known
