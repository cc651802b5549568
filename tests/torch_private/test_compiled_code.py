"""Contracts of `torch_private/compiled_code.py`."""

from __future__ import annotations

import torch
from torch import nn

from tutti.torch_private.compiled_code import (
    OptimizedModule,
    nested_traces_allowed,
    plain,
    plain_module,
)
from tutti.torch_private.tracing import trace


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_compiled_function_holds_the_plain_one() -> None:
    assert plain(torch.compile(_double, backend="eager")) is _double
    assert plain(_double) is _double


def test_a_compiled_module_holds_the_plain_one() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, OptimizedModule) and plain_module(compiled) is module


def test_compiled_code_runs_as_it_was_inside_of_a_trace() -> None:
    compiled = torch.compile(_double, backend="eager")
    with nested_traces_allowed(), torch.compiler.set_stance("force_eager"):
        traced = trace(compiled, [torch.ones(2)])
    assert traced(torch.ones(2)).tolist() == [2, 2]
    assert torch.ops.aten.mul.Tensor in [n.target for n in traced.graph.nodes]
