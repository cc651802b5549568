"""Contracts of `torch_private/quick_nodes.py`: the same nodes as PyTorch's own record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import zoo
from fake_calls import forms
from tutti.capture.step import capture
from tutti.torch_private import quick_nodes
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.quick_nodes import RECORD_OF_OPS, recorded
from tutti.torch_private.symbolic import ConstantSource, DimDynamic, NumberEnv
from tutti.torch_private.tracing import trace

aten = torch.ops.aten
KEPT = torch.ones(3)


def described(graph: fx.Graph) -> list[Any]:
    """All that a node has; of its value the form."""
    return [
        (
            *(n.op, n.target, n.name, repr(n.args), repr(n.kwargs)),
            [type(x) for x in (n.args, n.kwargs, *n.args, *n.kwargs.values())],
            {k: repr(v) for k, v in n.meta.items() if k != "val"},
            "val" in n.meta and forms(n.meta["val"], []),
        )
        for n in graph.nodes
    ]


def as_constants(x: Tensor) -> Tensor:
    three = torch.tensor(3.0)
    assert three.item() == 3.0
    return x * three + torch.tensor([1.0, 2.0, 3.0]) + KEPT


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1).mul_(y)
    y.t_()
    out = torch.empty(2, 3)
    torch.neg(x.t(), out=out.t())
    return y, out  # type: ignore[return-value]


def in_lists(x: Tensor) -> Tensor:
    left, right = x.split(2) if x.shape[0] > 3 else (x, x)
    joined = torch.cat([left, right], dim=1)
    return torch.stack((joined, joined))[:, None, [0, 1]].sum((0, 1), dtype=torch.float64)


def of_many_results(x: Tensor) -> Any:
    values, indices = x.topk(2)
    norm, *_ = aten.native_layer_norm.default(x, [x.shape[1]], None, None, 1e-5)
    return values, indices, norm, x.max(), x.unbind()


def without_autograd(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.linear(x, x).softmax(-1)


def random(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid()) + torch.rand(3) + F.dropout(x, 0.5)


def decomposed(x: Tensor) -> Tensor:
    return x.sinh() + 1


def on_backward(x: Tensor) -> Tensor:
    w = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((w.exp() @ w.t()).square().sum(), w)
    return slope


STEPS = (
    *(as_constants, in_place, in_lists, of_many_results, without_autograd, random, decomposed),
    on_backward,
)
TABLE = {aten.sinh.default: lambda x: (x.exp() - (-x).exp()) / 2}


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("fake", [True, False])
def test_a_trace_is_the_same(step: Callable[[Tensor], Any], fake: bool) -> None:
    def graph(record: Any) -> list[Any]:
        mode, x = FakeTensorMode(allow_non_fake_inputs=True), torch.ones(4, 3)
        with mock.patch.object(*RECORD_OF_OPS, record):
            if not fake:
                return described(trace(step, [x], TABLE).graph)
            given = mode.from_tensor(x)
            with mode:
                return described(trace(step, [given], TABLE).graph)

    assert graph(recorded) == graph(quick_nodes._plain_record)


def test_a_trace_with_symbols_is_the_same() -> None:
    def graph(record: Any) -> list[Any]:
        mode = FakeTensorMode(shape_env=NumberEnv(), static_shapes=True)
        env, source = mode.shape_env, ConstantSource("rate")
        assert env is not None
        made = env.create_unspecified_symbol(0.5, source, DimDynamic.DYNAMIC)
        rate = env.create_symfloatnode(made, hint=0.5, source=source)
        given = mode.from_tensor(torch.ones(3))
        with mock.patch.object(*RECORD_OF_OPS, record), mode:
            found = trace(lambda x, r: (x * r, x.add(x, alpha=r * 2), x + 1), [given, rate])
        return described(found.graph)

    assert graph(recorded) == graph(quick_nodes._plain_record)


def test_a_value_of_a_fake_outside_is_a_node() -> None:
    """PyTorch's own record gives a symbol that no node has, or refuses to compute with it."""
    mode = FakeTensorMode(shape_env=NumberEnv(), static_shapes=True)
    kept = mode.from_tensor(KEPT[:1])

    def scaled(x: Tensor) -> Tensor:
        return x * kept.item() + kept

    with mock.patch.object(*RECORD_OF_OPS, recorded), mode:
        traced = trace(scaled, [mode.from_tensor(torch.ones(3))])
    constant, read, *_ = [n for n in traced.graph.nodes if n.op != "placeholder"]
    assert getattr(traced, str(constant.target)) is kept
    assert read.target is aten._local_scalar_dense.default and read.args == (constant,)
    assert constant.meta["val"].shape == (1,)
    assert [n.op for n in traced.graph.nodes].count("get_attr") == 1


def test_most_ops_of_a_step_are_recorded_here() -> None:
    step, model, optimizer, batches = zoo.CASES["llama"].build()
    with (
        mock.patch.object(*RECORD_OF_OPS, recorded),
        mock.patch.object(quick_nodes, "_plain_record", wraps=quick_nodes._plain_record) as plain,
    ):
        found = capture(step, model, optimizer, batches[0])
    others = [call.args[1] for call in plain.call_args_list]
    ops = [n for n in found.graph.nodes if n.op == "call_function"]
    assert len(others) < len(ops) / 10, others


@pytest.mark.parametrize("name", ["resnet", "checkpoint", "lstm"])
def test_a_capture_is_the_same(name: str) -> None:
    def captured(record: Any) -> list[Any]:
        step, model, optimizer, batches = zoo.CASES[name].build()
        with mock.patch.object(*RECORD_OF_OPS, record):
            return described(capture(step, model, optimizer, batches[0]).graph)

    assert captured(recorded) == captured(quick_nodes._plain_record)


def test_the_leaves_of_results_are_tracked() -> None:
    """What a later op takes is the node that gave it."""
    with FakeTensorMode() as mode, mock.patch.object(*RECORD_OF_OPS, recorded):
        given = mode.from_tensor(torch.ones(4, 3))
        graph = trace(of_many_results, [given]).graph
    assert not [n for n in graph.nodes if n.op == "get_attr"]
    assert len(tree_leaves(graph.output_node().args)) == 8
