"""A function as the canonical graph that a capture makes of it, and what that computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tutti.capture.spelling.canonical import canonicalize


def canonical(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Graph:
    """The graph of `function`, rewritten."""
    mode = FakeTensorMode()
    with mode:
        module = make_fx(function)(*map(mode.from_tensor, inputs))
    canonicalize(module.graph, module, mode)
    return module.graph


def played(graph: fx.Graph, *inputs: Tensor) -> Tensor:
    """What a graph gives for `inputs`."""
    return fx.GraphModule(nn.Module(), graph)(*inputs)


def targets(graph: fx.Graph) -> set[Any]:
    """What a graph calls."""
    return {n.target for n in graph.nodes}
