"""Contracts of `torch_private/op_tables.py`."""

from __future__ import annotations

import torch

from tutti.torch_private.op_tables import (
    NN_BINDINGS,
    OpOverload,
    all_op_names,
    boxed_call,
    has_kernel,
    overload_name,
    python_call,
    schema_of,
)

aten = torch.ops.aten


def test_an_overload_has_a_type_and_a_name() -> None:
    assert isinstance(aten.add.Tensor, OpOverload) and not isinstance(aten.add, OpOverload)
    assert overload_name(aten.add.Tensor) == "Tensor"
    assert overload_name(aten.relu.default) == "default"


def test_a_schema_says_names_types_defaults_and_aliasing() -> None:
    schema = schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.overload_name == "Tensor" and schema.is_mutable
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None
    assert schema.arguments[2].has_default_value() and schema.arguments[2].default_value == 1
    assert str(schema.arguments[0].type) == "Tensor"
    assert not schema_of(aten.add.Tensor).is_mutable
    assert schema_of(aten.relu.default).overload_name == ""
    view = schema_of(aten.view.default)
    assert not view.arguments[0].alias_info.is_write and view.returns[0].alias_info is not None


def test_all_ops_are_named_though_nobody_has_used_them() -> None:
    assert {"aten::add.Tensor", "aten::relu", "c10d::allreduce_"} <= {*all_op_names()}


def test_an_op_has_kernels_at_keys() -> None:
    assert has_kernel("aten::relu", "CPU") and not has_kernel("aten::permute", "Meta")
    assert has_kernel("aten::permute", "CompositeExplicitAutograd")
    assert has_kernel("aten::_fused_adamw_", "CPU")


def test_the_shortest_call_of_an_op_does_what_the_op_does() -> None:
    x = torch.arange(4.0)
    call, *before = boxed_call(aten.add.Tensor)
    assert call(*before, x, x, alpha=2).tolist() == (3 * x).tolist()
    assert python_call(aten.add.Tensor)(x, x, alpha=2).tolist() == (3 * x).tolist()


def test_functions_of_nn_are_bound() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    assert NN_BINDINGS.linear(x, w).tolist() == [[3.0] * 4] * 2
    assert NN_BINDINGS.gelu(x).tolist() == torch.nn.functional.gelu(x).tolist()
