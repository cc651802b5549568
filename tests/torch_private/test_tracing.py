"""Contracts of `torch_private/tracing.py`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import fx

from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.tracing import (
    METADATA_OF_NODES,
    PythonKeyTracer,
    functorch_on,
    get_proxy_mode,
    get_proxy_slot,
    plain_of_functional,
    trace,
    track_tensor_tree,
    without_code,
    wrapped_functional,
)


def _step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad((x @ w).square().sum(), w)
    return w - 0.1 * slope


def test_a_forward_and_a_backward_are_one_graph_with_fake_values() -> None:
    w, x = torch.ones(3, requires_grad=True), torch.ones(2, 3)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(w), mode.from_tensor(x)]
        traced = trace(_step, fakes)
    ops = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.mv.default in ops and torch.ops.aten.sub.Tensor in ops
    assert all("val" in n.meta for n in traced.graph.nodes if n.op != "output")
    assert torch.equal(traced(w, x), _step(w, x))


def test_a_decomposition_takes_the_place_of_an_op() -> None:
    forms = {torch.ops.aten.sinh.default: lambda x: (x.exp() - (-x).exp()) / 2}
    traced = trace(lambda x: x.sinh(), [torch.ones(2)], forms)
    assert torch.ops.aten.sinh.default not in [n.target for n in traced.graph.nodes]


def test_the_trace_that_runs_knows_the_node_of_a_value() -> None:
    assert get_proxy_mode() is None
    found: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        mode = get_proxy_mode()
        assert mode is not None and isinstance(mode.tracer, PythonKeyTracer)
        y = x + 1
        found.append(get_proxy_slot(y, mode.tracer).proxy.node)
        return y

    traced = trace(step, [torch.ones(2)])
    assert found[0].target is torch.ops.aten.add.Tensor and found[0] in [*traced.graph.nodes]


def test_a_value_can_be_made_known_as_a_node_s() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        of_x = get_proxy_slot(x, tracer).proxy.node
        node = tracer.graph.call_function(torch.ops.aten.neg.default, (of_x,))
        value = torch.empty_like(x)
        track_tensor_tree(value, fx.Proxy(node, tracer), constant=None, tracer=tracer)
        return value

    traced = trace(step, [torch.ones(2)])
    assert traced(torch.ones(2)).tolist() == [-1, -1]


def test_a_tracer_s_class_notes_on_each_node() -> None:
    assert issubclass(PythonKeyTracer, fx.Tracer)


def test_without_code_a_module_makes_none_before_it_is_called() -> None:
    with without_code():
        traced = trace(lambda x: x + 1, [torch.ones(2)])
    assert "_LazyGraphModule" in [kind.__name__ for kind in type(traced).__mro__]
    assert traced(torch.ones(2)).tolist() == [2, 2]


def test_a_node_s_metadata_can_be_left_out() -> None:
    with mock.patch.object(*METADATA_OF_NODES, lambda _: None):
        traced = trace(lambda x: x + 1, [torch.ones(2)])
    node = next(n for n in traced.graph.nodes if n.op == "call_function")
    assert node.meta.get("tensor_meta") is None and node.meta["val"].shape == (2,)


def test_a_functional_tensor_is_unwrapped_after_its_writes_and_wrapped() -> None:
    real, made = torch.ones(2), torch.zeros(2)
    assert plain_of_functional(real) is real
    seen = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:1].add_(1)
        seen.append(plain_of_functional(y))
        z = wrapped_functional(made)
        z.add_(5)
        seen.append(plain_of_functional(z))
        return z + y

    assert torch.func.functionalize(inside)(real).tolist() == [7, 6]
    assert [x.tolist() for x in seen] == [[2, 1], [5, 5]]


def test_fakes_are_traced_as_they_are() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(2, 3)
    traced = trace(lambda x: x.sum(0), [x])
    val = next(n for n in traced.graph.nodes if n.op == "call_function").meta["val"]
    assert val.fake_mode is mode and val.shape == (3,)


def _counted(x: torch.Tensor) -> torch.Tensor:
    new = torch.zeros(2)
    new.view(2, 1)[0].add_(x)
    return new.sum()


def test_a_trace_has_the_writes_into_new_tensors_where_functorch_is_off() -> None:
    """As after `print(tensor)` in a thread of which another one holds the frames."""
    held = torch._C._DisableFuncTorch()
    with FakeTensorMode() as mode:
        traced = trace(
            torch.func.functionalize(_counted, remove="mutations"),
            [mode.from_tensor(torch.ones(()))],
        )
    with functorch_on():
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTORCH)
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTORCH)
    del held
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTORCH)
    assert float(traced(torch.tensor(3.0))) == 3.0


_FUNCTORCH: Any = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode  # type: ignore[attr-defined]
