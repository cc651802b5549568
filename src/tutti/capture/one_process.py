"""A trace of one device: its process belongs to no group, and does not communicate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tutti.capture.patch_table import DEFAULT_GROUP, PROCESSES
from tutti.errors import CaptureError
from tutti.graph.edits.patch import replaced
from tutti.torch_private.op_tables import all_op_names
from tutti.user_lines import quoted, user_line

# Their answers for one process.
_QUERIES = {"get_rank": 0, "get_world_size": 1}
_NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")


def _refuse(name: str, *_args: Any, **_options: Any) -> Any:
    raise CaptureError(
        f"the step communicates by itself: {name}",
        at=quoted(user_line()),
        why="it is captured as the step of one device on the whole batch, and the layout adds what ranks "
        "exchange: a loss that it returns is already that of all samples",
        fix="take it out, or leave it to `if torch.distributed.is_initialized():`, which is false inside of "
        "a captured step",
    )


def _all_reduce(
    _tensor: Any, op: Any = dist.ReduceOp.SUM, _group: Any = None, *_: Any, **more: Any
) -> None:
    """A mean or an extreme over one process is the value. It refuses a sum, which may be part of a mean."""
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN) or more.get("async_op"):
        _refuse("torch.distributed.all_reduce")


def _nothing(*_args: Any, **_options: Any) -> None:
    """A broadcast, or a barrier, of one process: no effect."""


@functools.cache
def communicating_ops() -> dict[Any, Callable[..., Any]]:
    """PyTorch's ops that communicate, each with its refusal, in the form of `make_fx`'s decompositions."""
    found: dict[Any, Callable[..., Any]] = {}
    for full in all_op_names():
        name, _, overload = full.partition(".")
        if name.startswith(_NAMESPACES):
            space, _, op = name.partition("::")
            packet = getattr(getattr(torch.ops, space), op)
            found[getattr(packet, overload or "default")] = functools.partial(_refuse, name)
    return found


class _ByAnyName(TorchFunctionMode):
    """Under a mode PyTorch looks collectives up by their own name: `all_reduce` may have been imported, as
    `average`, before the trace replaces it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """For this thread `torch.distributed.is_initialized()` is false inside; collectives are refused.

    So code with a branch for several processes, such as layers that average their statistics, takes that
    of one device. `get_rank()` is 0 and `get_world_size()` 1. A barrier, a broadcast, and a mean
    or an extreme over processes do nothing.
    """
    if not dist.is_initialized():
        yield
        return
    group: Any = DEFAULT_GROUP.original
    nothing = property(lambda _: None, group.fset)
    every = (*((p, _instead(p.name)) for p in PROCESSES), (DEFAULT_GROUP, nothing))
    with replaced(*every), _ByAnyName():
        yield


def _instead(name: str) -> Callable[..., Any]:
    if name in _QUERIES:
        return lambda *_, **__: _QUERIES[name]
    if name == "all_reduce":
        return _all_reduce
    if name in ("broadcast", "barrier"):
        return _nothing
    return functools.partial(_refuse, f"torch.distributed.{name}")
