"""Contracts of `torch_private/dtensors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute

from tutti.torch_private.dtensors import (
    AnsweringDTensor,
    local_part,
    local_parts,
    made_of,
    set_local_part,
    spec_of,
    spec_with_dtype,
    without_advice,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


class _Shard(DTensor): ...


def test_the_part_of_a_rank_is_the_tensor_itself(mesh: DeviceMesh) -> None:
    part = torch.zeros(2, 3)
    x = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    assert local_part(x).data_ptr() == part.data_ptr() and type(local_part(x)) is torch.Tensor
    other = torch.ones(2, 3)
    set_local_part(x, other)
    found = local_parts([x, part, x], [True, False])
    assert found[0] is other and found[1] is part and found[2] is x
    assert local_part(x) is other and x.full_tensor().tolist() == other.tolist()


def test_a_subclass_is_made_of_a_part_and_a_spec_without_autograd(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    part = torch.ones(2, 3)
    made = made_of(_Shard, part, spec_of(x))
    assert type(made) is _Shard and local_part(made) is part
    assert made.placements == x.placements and made.device_mesh is x.device_mesh
    assert made.is_leaf and not made.requires_grad
    assert made_of(DTensor, part, spec_of(x), requires_grad=True).requires_grad


def test_a_spec_of_another_dtype_differs_in_that(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    spec = spec_with_dtype(spec_of(x), torch.bfloat16)
    assert spec.tensor_meta.dtype == torch.bfloat16 and spec_of(x).tensor_meta.dtype == x.dtype
    made = made_of(DTensor, torch.zeros(2, 3, dtype=torch.bfloat16), spec)
    assert made.dtype == torch.bfloat16 and made.shape == x.shape and made.stride() == x.stride()


class _Answering(AnsweringDTensor):
    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        cls.seen.append(func)
        given = [local_part(x) if isinstance(x, cls) else x for x in args]
        return made_of(cls, func(*given, **(kwargs or {})), spec_of(args[0]))


def test_a_class_answers_the_ops_on_its_tensors(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    made = made_of(_Answering, local_part(x), spec_of(x))
    aten = torch.ops.aten
    y = aten.mul.Tensor((made + 1).detach(), 2)
    assert type(y) is _Answering and local_part(y).tolist() == [4, 4]
    assert _Answering.seen == [aten.add.Tensor, aten.detach.default, aten.mul.Tensor]
    assert type(torch.nn.Parameter(made).detach()) is _Answering


def test_a_plain_dtensor_answers_itself(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    assert type(x + 1) is DTensor and (x + 1).full_tensor().tolist() == [2, 2]


def test_advice_on_meshes_is_not_logged(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    advise = getattr(_redistribute, "_warn_flatten_optimization_not_possible", None)
    if advise is None:
        pytest.skip("this PyTorch gives no advice on meshes")
    given = mesh, (0,), (Shard(0),), (Replicate(),), 2, "all_gather"
    with without_advice():
        advise(*given, "non_ascending_mesh_dims")
    assert not caplog.records
    advise(*given, "no_flattened_mesh")
    assert [one.name for one in caplog.records] == [_redistribute.__name__]
