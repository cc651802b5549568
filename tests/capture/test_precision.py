"""`precision=bf16`: what runs in which dtype, where autocast is on and off, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tutti
import zoo
from subjects import subject
from tutti.capture.captured import Captured
from tutti.capture.precision import DTYPES, computing
from tutti.capture.step import capture
from tutti.errors import LayoutError
from tutti.layout.layout import PRECISIONS
from tutti.verification.verdict import Subject

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.matmul.default)
HALF = torch.bfloat16


def dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def matmuls(captured: Captured, *regions: str) -> Iterator[fx.Node]:
    for node in captured.graph.nodes:
        if node.target in MATMULS and node.meta["region"] in regions:
            yield node


def bf16(step: Callable[..., Any], model: nn.Module, optimizer: Any, *batch: Any) -> Captured:
    return capture(step, model, optimizer, batch, precision="bf16")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_every_precision_of_the_layout_has_a_dtype() -> None:
    assert tuple(DTYPES) == PRECISIONS


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_matmuls_run_in_bf16_and_the_loss_and_the_update_in_fp32(name: str) -> None:
    captured = subject(name, "bf16").captured
    nodes = [n for n in captured.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    contractions = list(matmuls(captured, "forward", "backward"))
    contractions += [n for n in nodes if n.target is aten.convolution.default]
    assert contractions and {dtype(n) for n in contractions} == {HALF}
    losses = [n for n in nodes if n.target in (aten._log_softmax.default, aten.exp.default)]
    assert losses and {dtype(n) for n in losses} == {torch.float32}
    update = [n for n in nodes if n.meta.get("region") == "update"]
    assert update and HALF not in {dtype(n) for n in update}
    assert HALF not in {dtype(n) for n in captured.output[1]}
    assert HALF not in {s.tensor.dtype for s in captured.state}


def test_without_it_nothing_is_bf16() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    captured = capture(train, model, sgd(model), (torch.randn(4, 8),))
    dtypes = {dtype(n) for n in captured.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    assert HALF not in dtypes


def test_gradients_of_a_weight_used_twice_add_up_in_fp32() -> None:
    """The cast of a weight is one value, but its two gradients are cast back before they are added."""
    layer = nn.Linear(8, 8, bias=False)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        return train(nn.Sequential(model, nn.ReLU(), model), optimizer, x)

    captured = bf16(step, layer, sgd(layer), torch.randn(4, 8))
    users = captured.placeholder("weight").users
    casts = [u for u in users if isinstance(u.meta["val"], torch.Tensor) and dtype(u) == HALF]
    assert len(casts) == 1
    assert len(casts[0].users) >= 2
    sums = [n for n in captured.graph.nodes if n.target is aten.add.Tensor]
    assert {dtype(n) for n in sums if n.meta["region"] == "backward"} == {torch.float32}


class Views(nn.Module):
    """A weight that is used through a transpose and through parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.weight.chunk(2)
        return x @ self.weight.t() + torch.cat([F.linear(x, a), F.linear(x, b)], -1)


def test_a_weight_seen_through_views_is_cast_once() -> None:
    model = Views()
    captured = bf16(train, model, sgd(model), torch.randn(4, 8))
    weight = captured.placeholder("weight")
    narrow = [n for n in captured.graph.nodes if n.target is aten._to_copy.default]
    narrow = [n for n in narrow if dtype(n) == HALF and n.args[0] is weight]
    assert len(narrow) == 1
    update = [n for n in weight.users if isinstance(n.meta["val"], list)]
    assert [dtype(n) for n in weight.users if n not in update] == [HALF]  # the cast
    assert {v.dtype for n in update for v in n.meta["val"]} == {torch.float32}


def test_equal_casts_of_an_activation_are_one() -> None:
    """Queries, keys and values each ask for the same input in bf16."""
    seen = set()
    for node in subject("gpt", "bf16").captured.graph.nodes:
        if node.target is aten._to_copy.default:
            key = (node.args[0], dtype(node), node.meta["region"])
            assert key not in seen
            seen.add(key)


# --- where autocast is on ------------------------------------------------------------------------


class Product(torch.optim.Optimizer):
    """An optimizer that multiplies matrices, as Shampoo and its kin do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad @ p.grad.mT) @ p)


def test_the_update_and_what_is_made_of_gradients_are_outside() -> None:
    model = nn.Linear(8, 8, bias=False)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grad = model.weight.grad
        assert isinstance(grad, Tensor)
        spectrum = grad @ grad.mT
        optimizer.step()
        return loss, spectrum

    captured = bf16(step, model, Product(model.parameters()), torch.randn(4, 8))
    found = list(matmuls(captured, "update"))
    assert len(found) == 3
    assert {dtype(n) for n in found} == {torch.float32}
    assert {dtype(n) for n in matmuls(captured, "forward", "backward")} == {HALF}


def test_the_next_forward_of_a_step_is_in_bf16_again() -> None:
    captured = subject("accumulate", "bf16").captured
    forward = list(matmuls(captured, "forward"))
    assert {dtype(n) for n in forward} == {HALF}
    once = list(matmuls(subject("scheduler", "bf16").captured, "forward"))
    assert len(forward) == 2 * len(once)


class Router(nn.Module):
    """Asks for full precision in one of its parts, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            gate = self.gate(x)
        return self.body(x) * gate


def test_the_users_own_word_counts_in_every_forward_and_its_backward() -> None:
    model = Router()

    def step(model: Router, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part in x.chunk(2):
            with torch.autocast("cpu", enabled=False):
                extra = model.gate(part).sum()  # the first call of a module after a backward
            (model(part).sum() + extra).backward()
        optimizer.step()
        return x.sum()

    captured = bf16(step, model, sgd(model), torch.randn(4, 8))
    kinds = {True: set[torch.dtype](), False: set[torch.dtype]()}
    for n in matmuls(captured, "forward", "backward"):
        kinds[n.meta["module"] == "gate"].add(dtype(n))
    assert kinds == {True: {torch.float32}, False: {HALF}}


def test_recomputation_in_the_backward_is_in_the_dtypes_of_the_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = checkpoint(model, x, use_reentrant=False).square().mean()  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    found = list(matmuls(bf16(step, model, sgd(model), torch.randn(4, 8)), "backward"))
    assert sum(n.target is aten.addmm.default for n in found) == 1  # what the backward reads
    assert {dtype(n) for n in found} == {HALF}


def test_a_gradient_inside_the_loss_leaves_the_rest_of_the_forward_in_bf16() -> None:
    model = nn.Linear(8, 8, bias=False)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = F.linear(slope, model.weight).square().mean()  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        return loss

    captured = bf16(step, model, sgd(model), torch.randn(4, 8))
    assert {dtype(n) for n in matmuls(captured, "forward")} == {HALF}


def test_a_forward_without_gradients_does_not_cost_the_next_one_its_own() -> None:
    """PyTorch's autocast cache would hand the cast made under `no_grad` to the training forward."""

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model(x)
        loss = (model(x) - teacher.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    found = Subject(step, model, sgd(model), (torch.randn(4, 8),), precision="bf16")
    assert set(found.captured.updated) == {"weight", "bias"}
    assert found.verdict(tutti.Layout.parse("data=2 precision=bf16")).ok


def state() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        torch.autograd.graph._engine_run_backward,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    before, model = state(), nn.Linear(8, 8)
    optimizer = sgd(model)
    try:
        with computing("bf16", model):
            assert torch.is_autocast_enabled("cpu")
            train(model, optimizer, torch.randn(4, 8))
            assert not torch.is_autocast_enabled("cpu")
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert state() == before
    model(torch.randn(4, 8))  # no hook is left that would switch it on
    assert not torch.is_autocast_enabled("cpu")


# --- what is refused, and what is left alone -------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_in_a_half_type_are_no_master_weights(kind: torch.dtype) -> None:
    model = nn.Linear(8, 8).to(kind)
    with pytest.raises(LayoutError) as caught:
        bf16(train, model, sgd(model), torch.randn(4, 8, dtype=kind))
    assert f'"weight" is {str(kind).removeprefix("torch.")}' in caught.value.what
    assert "model.float()" in caught.value.fix
    capture(train, model, sgd(model), (torch.randn(4, 8, dtype=kind),))  # without the word


def test_a_float64_model_is_refused_instead_of_left_as_it_is_in_silence() -> None:
    model = nn.Linear(8, 8).double()
    with pytest.raises(LayoutError, match="every weight is float64"):
        bf16(train, model, sgd(model), torch.randn(4, 8).double())


class Adapted(nn.Module):
    """A frozen base in bf16 and a float64 scale, both as the user asked, beside weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.adapter(x)) * self.scale


def test_what_has_another_dtype_on_purpose_keeps_it() -> None:
    torch.manual_seed(0)
    model = Adapted()
    found = Subject(train, model, sgd(model), (torch.randn(4, 8),), precision="bf16")
    states = {s.name: s.tensor.dtype for s in found.captured.state}
    assert states["base.weight"] == HALF and states["scale"] == torch.float64
    assert "base.weight" not in found.captured.updated
    assert found.verdict(tutti.Layout.parse("data=2 zero=3 precision=bf16")).ok


def test_evaluating_a_bf16_model_needs_no_master_weights() -> None:
    model = nn.Linear(8, 8).bfloat16()
    captured = bf16(lambda model, x: model(x), model, None, torch.randn(4, 8))
    assert {dtype(n) for n in matmuls(captured, "forward")} == {HALF}


class Dtypes(TorchDispatchMode):
    """The dtypes in which ops of some kinds compute."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: set[torch.dtype] = set()
        self.norms: set[tuple[Any, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MATMULS:
            self.matmuls.add(result.dtype)
        if func in NORMS:
            self.norms.add((func, (result if isinstance(result, Tensor) else result[0]).dtype))
        return result


NORMS = (aten.native_layer_norm.default, aten._log_softmax.default, aten._softmax.default)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its autocast not run")
@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_on_a_gpu_its_own_lists_count(name: str) -> None:
    """As of PyTorch's own autocast: cross entropy asks its softmax for the dtype of the logits."""
    step, model, optimizer, batches = zoo.CASES[name].build()
    assert optimizer is not None
    model = model.cuda()  # in place: the optimizer's parameters are these
    batch = tuple(x.cuda() for x in batches[0])
    found = Subject(step, model, optimizer, batch, precision="bf16")
    with Dtypes() as eager, torch.autocast("cuda", HALF):
        step(model, optimizer, *batch)
    contractions = list(matmuls(found.captured, "forward", "backward"))
    assert contractions and {dtype(n) for n in contractions} == eager.matmuls
    norms = [n for n in found.captured.graph.nodes if n.target in NORMS]
    results = [(n.target, n.meta["val"]) for n in norms]
    dtypes = {(op, (v[0] if isinstance(v, list | tuple) else v).dtype) for op, v in results}
    assert dtypes == eager.norms
    for layout in ("data=2", "data=2 zero=3"):
        assert found.verdict(tutti.Layout.parse(f"{layout} precision=bf16")).ok
