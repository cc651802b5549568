"""Autograd's engine: the start of a backward, the running node, and the version of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_autograd: Any = torch.autograd
_BINDINGS: Any = torch._C

# `version_of(x)`: the number of in-place writes of a tensor. Why: it shows a change without a read of values.
# Public: none.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def are_unwritten(noted: Iterable[tuple[Tensor, int]]) -> bool:
    """Whether each tensor still has the `version_of` noted with it.

    Why: as `version_of`, in a loop without calls. Public: none.
    """
    return all(x._version == version for x, version in noted)


# `set_grad_enabled(mode)`: a bare call, a third of a microsecond faster than the public class.
# Why: generated code switches gradients off and on at each step. Public: `torch.set_grad_enabled`.
set_grad_enabled: Callable[[bool], None] = _BINDINGS._set_grad_enabled


# The calls of the engine by each backward and each `torch.autograd.grad`: owners and a name, to patch.
# Why: a trace needs the start and the end of a backward. Public: none; hooks of a graph's nodes see each node
# and no end.
ENGINE_RUNS: tuple[tuple[Any, str], ...] = (
    (_autograd, "_engine_run_backward"),
    (_autograd.graph, "_engine_run_backward"),
)


def running_node_number() -> int | None:
    """The number of the running autograd node of this thread; None outside of a backward.

    Why: it leads from an op of the backward to the forward's op. Public: none.
    """
    node = _BINDINGS._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node_number() -> int:
    """The number that autograd gives to the next node of this thread.

    Why: as `running_node_number`. Public: none.
    """
    return _autograd._get_sequence_nr()
