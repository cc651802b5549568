"""Contracts of `torch_private/selective_checkpoints.py`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tutti.torch_private.selective_checkpoints import CHECK_OF_TRACING

aten = torch.ops.aten


def gradient(x: Tensor) -> Tensor:
    """Of `sin(tanh(x))`, whose tanh is kept."""

    def policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        kept = op is aten.tanh.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    x = x.detach().requires_grad_()
    made: Any = checkpoint(
        lambda y: torch.sin(torch.tanh(y)).exp(), x, use_reentrant=False, context_fn=contexts
    )
    return torch.autograd.grad(made.sum(), x)[0]


@pytest.mark.parametrize(("asks", "times"), [(True, 1), (False, 2)])
def test_a_selective_checkpoint_asks_one_function_whether_a_tracer_runs(
    asks: bool, times: int
) -> None:
    """Under a tracer it keeps the sine, too; otherwise the backward computes it again."""
    with mock.patch.object(*CHECK_OF_TRACING, lambda *_call: asks):
        graph = make_fx(gradient)(torch.randn(3)).graph
    graph.eliminate_dead_code()
    counts = Counter(node.target for node in graph.nodes)
    assert counts[aten.tanh.default] == 1 and counts[aten.sin.default] == times
