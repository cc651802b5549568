"""Calls as a trace has them, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tutti.capture.substitutes.other_forms import OTHER_FORMS, in_other_forms


def traced(call: Callable[..., Any], *given: Any) -> tuple[Any, set[Any]]:
    """What `call` gives when it is run as it is traced, and the ops that it runs."""
    with in_other_forms():
        graph = make_fx(call, OTHER_FORMS)(*given)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph(*given), {n.target for n in graph.graph.nodes}


def with_gradients(call: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The value of `call`, and the gradients of its operands for cotangents of many values."""
    given = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in given)
    value = call(*given)
    weight = torch.linspace(2, 0.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    floats = [x for x in given if x.requires_grad]
    return value, *torch.autograd.grad((value * weight).sum(), floats)
