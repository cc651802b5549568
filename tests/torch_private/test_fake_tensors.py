"""Contracts of `torch_private/fake_tensors.py`."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch

from tutti.torch_private.fake_tensors import (
    LOG,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    SizedFakeMode,
    empty_fake,
    fake_in,
    new_memory,
    under_modes,
)
from tutti.torch_private.op_tables import has_kernel
from tutti.torch_private.storages import memory_id
from tutti.torch_private.symbolic import ConstantSource, DimDynamic, NumberEnv


def test_a_fake_has_shape_dtype_and_device_and_answers_ops() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        y = x @ x.T
    assert type(y) is FakeTensor and y.shape == (3, 3)
    assert y.dtype == torch.bfloat16 and y.device.type == "cpu"


def test_a_fake_of_a_real_tensor_is_made_by_its_mode() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.zeros(2, 3))
    assert type(fake) is FakeTensor and fake.fake_mode is mode
    with mode:
        assert type(fake + torch.ones(3)) is FakeTensor


def test_a_value_read_and_a_shape_that_depends_on_values_are_errors_with_the_op() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException) as read:
        torch.zeros(()).item()
    assert read.value.func is torch.ops.aten._local_scalar_dense.default
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException) as shaped:
        torch.zeros(3).nonzero()
    assert shaped.value.func is torch.ops.aten.nonzero.default


class _Watched(SizedFakeMode):
    seen: ClassVar[list[Any]] = []

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(func)
        return super()._dispatch_impl(func, types, args, kwargs)


def test_every_op_is_worked_out_in_one_place_and_keeps_symbolic_sizes() -> None:
    mode = _Watched(shape_env=NumberEnv(), static_shapes=True)
    env, source = mode.shape_env, ConstantSource("size")
    assert env is not None
    symbol = env.create_symbol(6, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=6, source=source)
    with mode:
        y = torch.empty(size, 4).permute(1, 0).relu()
    permute = torch.ops.aten.permute.default
    assert has_kernel(permute.name(), "CompositeExplicitAutograd")
    assert not has_kernel(permute.name(), "Meta")
    assert {permute, torch.ops.aten.relu.default} <= {*_Watched.seen}
    assert isinstance(y.shape[1], torch.SymInt) and y.shape[0] == 4 and not env.guards


def test_the_logger_is_that_of_fakes() -> None:
    assert logging.getLogger(FakeTensorMode.__module__) is LOG


def test_a_fake_lies_in_memory_of_a_fake_or_in_new_memory() -> None:
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    x = empty_fake(mode, (3, 4), torch.float64, cpu)
    column = fake_in(mode, x.untyped_storage(), (3,), (4,), 1, torch.float64, cpu)
    assert type(column) is FakeTensor and memory_id(column) == memory_id(x)
    with mode:
        y = column * x[:, 1]
    assert y.fake_mode is mode and y.dtype == torch.float64 and y.device == cpu
    alone = fake_in(mode, new_memory(64), (2,), (1,), 0, torch.float32, torch.device("cuda:0"))
    assert memory_id(alone) != memory_id(x) and alone.untyped_storage().nbytes() == 64
    assert alone.device == torch.device("cuda:0")


def test_an_empty_fake_may_have_symbolic_sizes() -> None:
    mode = SizedFakeMode(shape_env=NumberEnv(), static_shapes=True)
    env, source = mode.shape_env, ConstantSource("size")
    assert env is not None
    symbol = env.create_symbol(6, source, DimDynamic.DYNAMIC)
    size: Any = env.create_symintnode(symbol, hint=6, source=source)
    fake = empty_fake(mode, (size, 4), torch.float32, torch.device("cpu"))
    assert isinstance(fake.shape[0], torch.SymInt) and fake.shape[1] == 4


def test_modes_are_seen() -> None:
    assert not under_modes()
    with FakeTensorMode() as mode:
        assert under_modes()
        assert empty_fake(mode, (2,), torch.float32, torch.device("cpu")).fake_mode is mode
