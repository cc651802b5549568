"""The bindings that generated code calls do, to the bit, what the ops do that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from as_eager import Program, assert_as_eager
from gradient_programs import small_model
from small_steps import trained
from tutti.execution.direct import DIRECT, direct
from tutti.execution.generate import generate
from tutti.layout import Mesh

aten = torch.ops.aten


def square(k: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    return (torch.rand(4, 4, generator=generator) * 3 + 0.5).to(dtype)


def batched(k: int) -> Tensor:
    return torch.stack([square(k), square(k + 1)])


def heads(k: int) -> Tensor:
    return torch.stack([batched(k), batched(k + 2)])


# Operands and options where an op takes other than one matrix, or as many as its schema has tensors.
GIVEN: dict[str, tuple[Any, ...]] = {
    "baddbmm.default": (batched(0), batched(1), batched(2)),
    "bmm.default": (batched(0), batched(1)),
    "bmm.out": (batched(0), batched(1)),
    "reshape.default": (square(), [2, 8]),
    "view.default": (square(), [2, 8]),
    "permute.default": (batched(0), [2, 0, 1]),
    "unsqueeze.default": (square(), 1),
    "expand.default": (square()[:1], [4, 4]),
    "cat.default": ([square(), square(1)], 1),
    "sum.dim_IntList": (batched(0), [0, 2], True),
    "mean.dim": (batched(0), [0, 2], True),
    "amax.default": (batched(0), [0, 2], True),
    "where.self": (square() > 1, square(1), square(2)),
    "full.default": ([3], 0.5),
    "full_like.default": (square(), 2),
    "bitwise_and.Tensor": (square() > 1, square(1) > 1),
    "bitwise_and_.Tensor": (square() > 1, square(1) > 1),
    "embedding.default": (square(), torch.tensor([[2, 0]])),
    "convolution.default": (
        heads(0), torch.ones(3, 2, 2, 2), None, [1, 1], [1, 0], [1, 1], False, [0, 0], 1,
    ),
    "native_layer_norm.default": (batched(0), [4], square()[0], square(1)[0], 1e-5),
    "_softmax.default": (square(), 1, False),
    "_log_softmax.default": (square(), 1, False),
    "_scaled_dot_product_flash_attention_for_cpu.default": (heads(0), heads(1), heads(2), 0.0, True),
    "index_add_.default": (square(), 0, torch.tensor([3, 1]), square(1)[:2]),
    "linear.default": (square(), square(1), square(2)[0]),
    "linear.out": (square(), square(1)),
    "fill_.Scalar": (square(), 2),
}  # fmt: skip


def name_of(op: Any) -> str:
    return f"{op._schema.name.removeprefix('aten::')}.{op._overloadname}"


def operands(op: Any) -> tuple[Any, ...]:
    if name_of(op) in GIVEN:
        return GIVEN[name_of(op)]
    needed = [a for a in op._schema.arguments if not (a.has_default_value() or a.kwarg_only)]
    kinds = [str(a.type) for a in needed]
    assert set(kinds) <= {"Tensor", "number"}, f"no operands for {op}"
    return tuple(square(k) if kind == "Tensor" else 1.5 for k, kind in enumerate(kinds))


def called(op: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What results, and the operands afterwards."""
    own = tree_map_only(Tensor, torch.clone, given)
    options: dict[str, Any] = {}
    if any(a.is_out for a in op._schema.arguments):
        options["out"] = torch.zeros(0)
    if any(a.name == "rounding_mode" for a in op._schema.arguments):
        options["rounding_mode"] = "floor"
    return function(*own, **options), [*tree_leaves(own), *options.values()]


@pytest.mark.parametrize("op", DIRECT, ids=name_of)
def test_a_binding_does_as_its_op(op: Any) -> None:
    same_as_op(op, operands(op))


def same_as_op(op: Any, given: tuple[Any, ...]) -> None:
    want, after = called(op, op, given)
    got, left = called(op, DIRECT[op], given)
    for a, b in zip([*tree_leaves(want), *after], [*tree_leaves(got), *left], strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(a, b)
    places = [any(x is y for y in left) for x in tree_leaves(got)]
    assert places == [any(x is y for y in after) for x in tree_leaves(want)]


# PyTorch takes a number in place of a tensor in all overloads of these.
ARITHMETIC = [
    f"{name}{end}" for name in ("add", "sub", "mul", "div", "floor_divide") for end in ("", "_")
]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_number_in_place_of_a_tensor(name: str) -> None:
    """The dispatcher's own call would refuse it."""
    tried = 0
    for overload in getattr(aten, name).overloads():
        op = getattr(getattr(aten, name), overload)
        kinds = [str(a.type) for a in op._schema.arguments]
        if kinds[:2] == ["Tensor", "Tensor"]:
            same_as_op(op, (square(), 2))
            if not name.endswith("_"):
                same_as_op(op, (2, square()))
            tried += 1
    assert tried >= 1


def divisions() -> Program:
    """Of tensors by plain numbers, and of numbers by tensors, rounded."""
    model = small_model()

    def loss_of(model: Any, x: Tensor) -> Tensor:
        z = model(x)
        index = torch.arange(z.shape[-1]) // 2
        steps = torch.div(index, 2, rounding_mode="trunc") + 7 // (index + 1)
        halves = x.clone()
        halves //= 0.5
        return (z * (index + steps) * (x.sum() // 0.25) + z * halves.sum() * z).mean()

    step: Any = trained(loss_of)
    return step, model, torch.optim.SGD(model.parameters(), lr=0.01), (torch.randn(8, 6),)


def test_a_step_that_divides_by_numbers() -> None:
    assert_as_eager(divisions)


# Without a binding: several results, none, options by name, an optional text, one of ours.
UNBOUND: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.gelu_backward.default, (square(), square(1)), {"approximate": "tanh"}),
    (
        aten.native_layer_norm_backward.default,
        (square(), square(1), [4], *[square(2)[:, :1]] * 2, square()[0], None, [True, True, False]),
        {},
    ),
    (aten._foreach_add_.Scalar, ([square(), square(1)], 1), {}),
    (aten.arange.start, (1, 5), {"dtype": torch.float64, "device": torch.device("cpu")}),
    (aten.round.decimals, (square(),), {"decimals": 1}),
    (aten.cumsum.out, (square(), 1), {"out": torch.zeros(4, 4)}),
    (torch.ops.tutti.onednn_matmul.default, (square(), square(1)), {}),
]  # fmt: skip


@pytest.mark.parametrize("has_dispatcher", [True, False])
@pytest.mark.parametrize(("op", "given", "options"), UNBOUND, ids=lambda x: str(x)[:30])
def test_an_op_without_a_binding(
    op: Any,
    given: tuple[Any, ...],
    options: dict[str, Any],
    has_dispatcher: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the dispatcher's own call, and by the overload's where PyTorch has no such call."""
    assert op not in DIRECT and hasattr(torch._C, "_dispatch_call_boxed")
    if not has_dispatcher:
        monkeypatch.delattr(torch._C, "_dispatch_call_boxed")
    function, *first = direct(op)
    assert len(first) == has_dispatcher
    own, other = (tree_map_only(Tensor, torch.clone, (given, options)) for _ in range(2))
    want, got = op(*own[0], **own[1]), function(*first, *other[0], **other[1])
    assert type(want) is type(got)
    for a, b in zip(tree_leaves((want, own)), tree_leaves((got, other)), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("exponent", [2, 2.0, 3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_square_is_a_power(exponent: float, dtype: torch.dtype) -> None:
    x = (torch.linspace(-3, 3, 200) * 7).to(dtype)
    got, want, text = written(aten.pow.Tensor_Scalar, x, exponent)
    assert got.dtype == want.dtype and torch.equal(got.nan_to_num(), want.nan_to_num())
    assert ("square()" in text) == (exponent == 2 and want.dtype == dtype)


def viewed(op: Any, *args: Any) -> tuple[Tensor, Tensor, str]:
    """A view by generated code, by the op, and the code."""
    return written(op, torch.arange(4 * 6 * 5.0).view(4, 6, 5)[:, :, : args[0]], *args[1:])


def written(op: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, str]:
    """What generated code makes, what the op makes, and the code."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta = {"val": x}
    want = op(x, *rest)
    made = graph.call_function(op, (node, *rest))
    made.meta = {"val": want}
    graph.output(([made], []))
    generated = generate(graph, nn.Module(), None, Mesh(()), {})
    (got,), _ = generated.function([x], None)
    return got, want, generated.text


@pytest.mark.parametrize(
    "dims", [[0, 2, 1], [2, 1, 0], [1, 0, 2], [0, -1, 1], [1, 2, 0], [0, 1, 2]]
)
def test_permutations(dims: list[int]) -> None:
    got, want, text = viewed(aten.permute.default, 3, dims)
    assert got.stride() == want.stride() and torch.equal(got, want)
    assert ("transpose" in text) == (sum(d % 3 != k for k, d in enumerate(dims)) == 2)


@pytest.mark.parametrize(
    "rest",
    [(), (1,), (1, 2), (1, -3), (1, None, 4), (1, 1, 2**63 - 1), (-1, 2, -1), (1, 9), (1, -9, 3), (1, 4, 2)],
)  # fmt: skip
def test_slices(rest: tuple[Any, ...]) -> None:
    got, want, text = viewed(aten.slice.Tensor, 5, *rest)
    assert got.stride() == want.stride() and torch.equal(got, want)
    assert got.data_ptr() == want.data_ptr() and "narrow" in text


def test_a_slice_in_steps_is_left() -> None:
    got, want, text = viewed(aten.slice.Tensor, 5, 1, 0, 6, 2)
    assert torch.equal(got, want) and "narrow" not in text
