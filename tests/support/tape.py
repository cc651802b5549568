"""What a CUDA graph does, without a GPU: calls of ops recorded with their operands, and made again.

As with a CUDA graph nothing that is recorded has run, results lie at the same addresses at every replay, and
Python's numbers are those of the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """The ops called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [args[k] if k < len(args) else kwargs.get(a.name) for k, a in enumerate(_of(func))]
        for argument, value in zip(_of(func), given, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(x, x.clone()) for x in _tensors(value)]
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tree_leaves(result)))
        return result

    def take_back(self) -> None:
        """As if nothing had run: operands are as they were, and results are not there."""
        given: set[int] = set()
        own: dict[int, Tensor] = {}
        for _, args, kwargs, made in self.calls:
            given |= {_address(x) for x in _tensors((args, kwargs))} - own.keys()
            own |= {_address(x): x for x in _tensors(made) if _address(x) not in given}
        for x in own.values():
            x.untyped_storage().fill_(255)  # NaN, in every float
        for x, value in reversed(self.before):
            x.copy_(value)

    def replay(self) -> None:
        """Make every call again, with the operands that lie where they lay."""
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A `Recorder` as `cuda_graph` takes it."""
    tape = Tape()
    with tape:
        result = call()
    tape.take_back()
    return tape.replay, result


def _of(func: Any) -> Any:
    return func._schema.arguments


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
