"""Contracts of `torch_private/module_tables.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from tutti.torch_private.module_tables import (
    FLAT_WEIGHTS,
    OF_TENSORS,
    TENSOR_HOOKS,
    buffers_of,
    children_of,
    count_as_parameter,
    hooks_of_all_modules,
    hooks_of_module,
    hooks_of_tensor,
    parameters_of,
    renew_flat_weights,
    share_tensor_hooks,
)


def _nothing(*_given: object) -> None: ...


def test_a_tensor_has_few_attributes_of_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0]), [Replicate()])
    finally:
        dist.destroy_process_group()
    assert vars(nn.Parameter(x)).keys() == OF_TENSORS
    assert not vars(nn.Parameter(torch.ones(2))) and not vars(torch.ones(2)) and not vars(x)


def test_a_tensor_of_a_subclass_counts_as_a_parameter() -> None:
    x = torch.ones(2).as_subclass(_Own)
    assert not isinstance(x, nn.Parameter)
    count_as_parameter(x)
    assert isinstance(x, nn.Parameter) and vars(x).keys() == OF_TENSORS


class _Own(torch.Tensor): ...


def test_a_module_looks_in_its_tables() -> None:
    module = nn.BatchNorm1d(2, affine=True)
    other = nn.Parameter(torch.zeros(2))
    assert {*parameters_of(module)} == {"weight", "bias"}
    assert {*buffers_of(module)} == {"running_mean", "running_var", "num_batches_tracked"}
    parameters_of(module)["weight"] = other
    buffers_of(module)["running_mean"] = made = torch.ones(2)
    assert module.weight is other and module.running_mean is made
    outer = nn.Sequential(module)
    assert children_of(outer) == {"0": module}
    children_of(outer)["later"] = module
    assert outer.get_submodule("later") is module


def test_recurrent_modules_have_their_weights_in_lists() -> None:
    module = nn.LSTM(2, 3)
    assert vars(module).keys() >= FLAT_WEIGHTS
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))
    assert not FLAT_WEIGHTS & vars(nn.Linear(2, 3)).keys()


def test_a_table_keeps_what_is_none() -> None:
    assert parameters_of(nn.Linear(1, 1, bias=False))["bias"] is None


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_pre_hook,
        nn.Module.register_forward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_full_backward_hook,
    ],
)
def test_a_hook_of_a_module_is_in_one_of_four_tables(register) -> None:
    module = nn.Linear(1, 1)
    tables = [*hooks_of_module(module)]
    assert list(map(len, tables)) == [0] * 4
    handle = register(module, _nothing)
    assert sum(map(len, tables)) == 1
    handle.remove()
    assert sum(map(len, tables)) == 0


@pytest.mark.parametrize(
    "register",
    [
        register_module_forward_pre_hook,
        register_module_forward_hook,
        register_module_full_backward_pre_hook,
        register_module_full_backward_hook,
    ],
)
def test_a_hook_of_all_modules_is_in_one_of_four_tables(register) -> None:
    tables = [*hooks_of_all_modules()]
    before = sum(map(len, tables))
    handle = register(_nothing)
    assert sum(map(len, tables)) == before + 1 and len(tables) == 4
    handle.remove()
    assert sum(map(len, tables)) == before


def test_hooks_of_a_tensor_are_in_two_tables_which_another_tensor_can_share() -> None:
    old, new = (nn.Parameter(torch.ones(2)) for _ in range(2))
    assert not any(hooks_of_tensor(old))
    seen: list[str] = []
    on = old.register_hook(lambda grad: seen.append("on"))
    old.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    assert [len(table or ()) for table in hooks_of_tensor(old)] == [1, 1]
    assert all(len(getattr(old, name)) == 1 for name in TENSOR_HOOKS)
    share_tensor_hooks(old, new)
    new.sum().backward()
    assert seen == ["on", "after"]
    on.remove()
    new.sum().backward()
    assert seen == ["on", "after", "after"]


def test_a_plain_tensor_has_no_hooks() -> None:
    assert not any(hooks_of_tensor(torch.ones(2)))


def test_an_lstm_reads_the_parameters_of_its_table_once_they_are_renewed() -> None:
    lstm, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    for name, p in [*parameters_of(lstm).items()]:
        parameters_of(lstm)[name] = nn.Parameter(torch.zeros_like(p))
    renew_flat_weights(lstm)
    assert not lstm(x)[0].any()
    renew_flat_weights(nn.Linear(1, 1))
