"""Contracts of `torch_private/quick_fakes.py`: the same fakes as PyTorch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zoo
from fake_calls import CALLS, MODE, column, fake, forms, transposed
from tutti.capture.captured import Captured
from tutti.capture.python import inputs
from tutti.capture.step import capture
from tutti.graph.text import text
from tutti.torch_private import quick_fakes
from tutti.torch_private.fake_tensors import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.quick_fakes import (
    CONSTANTS,
    SNAPSHOTS,
    QuickFakeMode,
    quick_fake,
    snapshot,
)
from tutti.torch_private.storages import memory_id
from tutti.torch_private.symbolic import ConstantSource, DimDynamic, NumberEnv

aten = torch.ops.aten
_C: Any = torch._C


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    with mock.patch.object(quick_fakes, "_KNOWN", {}):
        yield


@contextlib.contextmanager
def torch_warns_always() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_quick_fake_is_as_a_fake(device: str) -> None:
    mode, where = FakeTensorMode(), torch.device(device)
    plain = FakeTensor(mode, meta(3, 4), where)
    for _ in range(2):  # the first one is made by PyTorch
        made = quick_fake(mode, meta(3, 4), where)
        assert type(made) is FakeTensor and vars(made) == vars(plain)
        assert made.device == where and not made.requires_grad and made.is_leaf
        assert _C._dispatch_key_set(made) == _C._dispatch_key_set(plain)
        with mode:
            assert (made + 1).device == where


@pytest.mark.parametrize("allowed", [False, True])
def test_the_memory_of_a_quick_fake_is_read_as_that_of_a_fake(allowed: bool) -> None:
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    mode._allow_unsafe_data_ptr_access = allowed
    quick_fake(mode, meta(3), cpu)
    for x in (FakeTensor(mode, meta(3), cpu), quick_fake(mode, meta(3), cpu)):
        if allowed:
            with pytest.warns(UserWarning, match="data pointer"), torch_warns_always():
                assert x.data_ptr() == 0
        else:
            with pytest.raises(RuntimeError, match="data pointer"):
                x.data_ptr()


@pytest.mark.parametrize("make", [lambda: fake(4, 6), transposed, column])
def test_a_snapshot_is_the_value_before_later_writes(make: Callable[[], Tensor]) -> None:
    x = make()
    plain = SNAPSHOTS[0].__dict__[SNAPSHOTS[1]](x)
    for under in (False, True):
        if under:
            with MODE:
                taken = snapshot(x)
        else:
            taken = snapshot(x)
        assert vars(taken) == vars(plain)
        assert forms([taken], [x]) == forms([plain], [x])
        assert _C._dispatch_key_set(taken) == _C._dispatch_key_set(plain)
    form = forms([taken], [])
    with MODE:
        x.unsqueeze_(0)
    assert forms([taken], []) == form


def test_a_snapshot_of_a_weight_needs_no_gradient() -> None:
    x = fake(3).requires_grad_()
    assert not snapshot(x).requires_grad and snapshot(x).is_leaf


def test_a_snapshot_of_a_conjugate() -> None:
    with MODE:
        x = torch.empty(3, dtype=torch.complex64).conj()
    assert snapshot(x).is_conj() and type(snapshot(x)) is FakeTensor


def uncached(function: Callable[..., Any], args: Any) -> Any:
    with mock.patch.object(MODE, "cache_enabled", False), MODE:
        return function(*args)


def run(function: Callable[..., Any], args: Any) -> tuple[Any, int]:
    """The result of a call, and the number of ops that the mode evaluated for it."""
    with mock.patch.object(MODE, "_dispatch_impl", wraps=MODE._dispatch_impl) as evaluated, MODE:
        result = function(*args)
    return result, evaluated.call_count


OTHERS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "a factory": (lambda: torch.zeros(3, dtype=torch.bfloat16), tuple),
    "a factory's default dtype": (lambda: torch.zeros(3), tuple),
    "an operand given twice": (lambda x: aten.add_.Tensor(x, x), lambda: (fake(4),)),
    "an index": (
        aten.index.Tensor,
        lambda: (fake(4, 6), [None, fake(3, dtype=torch.int64)]),
    ),
    "random": (lambda x: aten.bernoulli.p(x, 0.5), lambda: (fake(4),)),
    "keywords": (lambda x: aten._to_copy.default(x, dtype=torch.float64), lambda: (fake(4),)),
    "an op with a composite kernel": (aten.linear.default, lambda: (fake(4, 6), fake(3, 6))),
    "attention": (
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0, True),
        lambda: (fake(2, 3, 8, 4),),
    ),
    "a view that is a new node": (aten._unsafe_view.default, lambda: (fake(4, 6), [24])),
    "an alias": (aten.detach.default, lambda: (fake(4, 6),)),
    "an update of its form": (aten.t_.default, lambda: (fake(4, 6),)),
    "resized": (lambda x: x.resize_(2, 2), lambda: (fake(4),)),
    "a conjugate": (aten._conj.default, lambda: (fake(4, dtype=torch.complex64),)),
}


@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_a_repeated_call_has_the_result_of_one_that_runs(name: str) -> None:
    function, make = (CALLS | OTHERS)[name]
    found = []
    for play in (uncached, *[lambda f, a: run(f, a)[0]] * 4):
        args = make()
        operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        result = play(function, args)
        keys = [_C._dispatch_key_set(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        same = [[x is y for y in operands] for x in tree_leaves(result)]
        found.append((forms(result, operands), keys, same, type(result)))
    assert all(one == found[0] for one in found)


def test_a_repeated_call_does_not_run() -> None:
    assert [run(aten.exp.default, (fake(4),))[1] for _ in range(3)] == [1, 0, 0]
    x = fake(4)
    with mock.patch.object(FakeTensorMode, "__torch_dispatch__") as slow, MODE:
        assert aten.exp.default(x).shape == (4,)
    slow.assert_not_called()


def others() -> Iterator[Callable[[], Any]]:
    yield lambda: torch.mul(fake(3, dtype=torch.int64), 1)
    yield lambda: torch.mul(fake(3, dtype=torch.int64), 1.0)
    yield lambda: torch.mul(fake(3, dtype=torch.int64), True)
    yield lambda: torch.mul(fake(3), 1)
    yield lambda: torch.exp(transposed())
    yield lambda: torch.exp(fake(6, 4))
    yield lambda: torch.exp(fake(6, 4, dtype=torch.float64))
    yield lambda: torch.sum(fake(6, 4), [0], keepdim=True)
    yield lambda: torch.sum(fake(6, 4), [0])
    yield lambda: torch.sum(fake(6, 4), [0], dtype=torch.float64)
    yield lambda: torch.mul(fake(6, 4).requires_grad_(), 2)
    yield lambda: torch.as_strided(fake(6, 4), [2], [3], 1)
    yield lambda: torch.as_strided(fake(6, 4), [2], [3], 2)
    yield lambda: torch.as_strided(column(), [2], [3], 2)
    yield lambda: torch.clamp(fake(3), min=1)
    yield lambda: torch.clamp(fake(3), max=1)
    yield lambda: torch.mul(torch.empty(3, device="cuda:0"), 1)
    yield lambda: torch.mul(torch.empty(3, device="cpu"), 1)


def test_calls_that_differ_are_told_apart() -> None:
    def form(x: Tensor) -> Any:
        return forms(x, []), x.requires_grad

    with mock.patch.object(MODE, "cache_enabled", False), MODE:
        plain = [form(make()) for make in others()]
    for _ in range(3):
        with MODE:
            assert [form(make()) for make in others()] == plain


def test_a_constant_is_told_by_its_type_and_value() -> None:
    values = (1, 1.0, True, "1", None, torch.int8, torch.device("cpu"), torch.strided)
    values = (*values, torch.channels_last, 2, 2.0, torch.int16, torch.device("meta"))
    assert {type(x) for x in values} == CONSTANTS
    assert len({(type(x), x) for x in values}) == len(values)


def test_the_default_dtype_and_inference_mode_are_part_of_a_call() -> None:
    for _ in range(3):
        with MODE:
            assert torch.full((2,), 1.5).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert torch.full((2,), 1.5).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
            with torch.inference_mode():
                assert torch.zeros(2).is_inference()
            assert not torch.zeros(2).is_inference()


def test_a_call_that_reads_values_is_refused_each_time() -> None:
    for _ in range(3):
        with MODE, pytest.raises(DataDependentOutputException):
            torch.zeros(()).item()
        with MODE:
            assert (torch.ones(2) * torch.tensor(3.0)).shape == (2,)  # a constant's value stays
            assert torch.tensor(3.0).item() == 3.0


def test_symbols_are_left_to_pytorch_and_what_runs_inside_is_not_taken_for_the_call() -> None:
    mode = QuickFakeMode(shape_env=NumberEnv(), static_shapes=True)
    env = mode.shape_env
    assert env is not None
    source = ConstantSource("rate")
    made = env.create_unspecified_symbol(0.5, source, DimDynamic.DYNAMIC)
    rate: Any = env.create_symfloatnode(made, hint=0.5, source=source)
    with mode:
        for _ in range(3):
            x = torch.empty(4)
            assert (x * rate).shape == (4,) and type(x * rate) is FakeTensor
            out, mask = torch.ops.aten.native_dropout.default(x, rate, True)
            assert out.dtype == torch.float32 and mask.dtype == torch.bool
    assert not any(type(y) is torch.SymFloat for key in quick_fakes._KNOWN for y in key)


def test_operands_of_another_mode_are_not_known() -> None:
    x = fake(4)
    with MODE:
        x.exp(), x.exp()
    other = QuickFakeMode()
    with other, pytest.raises(Exception, match="ixing fake modes"):
        x.exp()


def test_all_are_forgotten_before_they_are_too_many() -> None:
    with mock.patch.object(quick_fakes, "_MOST", 3), MODE:
        for n in range(10):
            assert torch.empty(n).exp().shape == (n,)
            assert len(quick_fakes._KNOWN) <= 3


def described(captured: Captured) -> list[Any]:
    """Of each node its value's form and memory."""
    memory: dict[int, int] = {}
    return [
        [
            (
                *forms(x, [])[0][:-1],
                memory.setdefault(memory_id(x), len(memory)),
                _C._dispatch_key_set(x),
            )
            if isinstance(x, Tensor)
            else str(x)
            for x in tree_leaves(node.meta.get("val"))
        ]
        for node in captured.graph.nodes
    ]


@pytest.mark.parametrize("name", ["resnet", "checkpoint", "lstm"])
def test_a_capture_is_the_same(name: str) -> None:
    def captured() -> tuple[str, list[Any]]:
        step, model, optimizer, batches = zoo.CASES[name].build()
        found = capture(step, model, optimizer, batches[0])
        return text(found.graph), described(found)

    with (
        mock.patch.object(inputs, "QuickFakeMode", FakeTensorMode),
        mock.patch.object(*SNAPSHOTS, quick_fakes._plain_snapshot),
    ):
        plain = captured()
    with mock.patch.object(*SNAPSHOTS, snapshot):
        for _ in range(2):
            assert captured() == plain
    assert quick_fakes._KNOWN
