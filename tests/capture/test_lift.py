"""State made explicit: names, slots that exist before the first step, hyper-parameters as inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import tutti
import zoo
from ranks import Ranks
from subjects import subject
from tutti.capture.state.lift import create_slots, hypers_of, place_counts, state_of
from tutti.errors import CaptureError, TuttiError
from tutti.modes import plain
from zoo_models import GPT, MLP
from zoo_steps import plain_step, vector_batch

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "decayed": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adam": partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def play(model: nn.Module, optimizer: Optimizer, num_steps: int = 3) -> list[Tensor]:
    return [plain_step(model, optimizer, *vector_batch(k % 2)).detach() for k in range(num_steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_create_slots_changes_nothing(name: str) -> None:
    """Weights stay, and the steps after it are bit for bit those of a fresh optimizer."""
    model, twin = mlp(), mlp()
    optimizer, fresh = (OPTIMIZERS[name](m.parameters()) for m in (model, twin))
    before = copy.deepcopy(model.state_dict())
    create_slots(optimizer)
    assert all(x.equal(before[n]) for n, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    if name != "sgd":
        assert all(optimizer.state[p] for p in model.parameters())
    again = {n: x.clone() for n, x in slots(optimizer).items()}
    create_slots(optimizer)  # once is enough: a second call must not step either
    assert all(x.equal(again[n]) for n, x in slots(optimizer).items())
    torch.manual_seed(1)
    losses = play(model, optimizer)
    torch.manual_seed(1)
    assert torch.stack(losses).equal(torch.stack(play(twin, fresh)))
    assert all(x.equal(twin.state_dict()[n]) for n, x in model.state_dict().items())


def slots(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{i}.{k}": v
        for i, s in enumerate(optimizer.state.values())
        for k, v in s.items()
        if isinstance(v, Tensor)
    }


@pytest.mark.parametrize("name", ["momentum", "decayed", "adamw", "rmsprop", "adafactor", "adam"])
def test_fresh_slots_are_zero(name: str) -> None:
    optimizer = OPTIMIZERS[name](mlp().parameters())
    create_slots(optimizer)
    assert slots(optimizer)
    assert all(not x.any() for x in slots(optimizer).values())


def test_dampened_momentum_is_refused_until_it_has_begun() -> None:
    """Its first step has another form than all later ones, so it cannot be captured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(CaptureError) as caught:
        create_slots(optimizer)
    assert "dampening=0.5" in caught.value.what and "first step" in caught.value.fix
    play(model, optimizer, 1)
    create_slots(optimizer)


def test_create_slots_keeps_gradients_hooks_and_slots_that_exist() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    play(model, optimizer, 1)
    before = {n: x.clone() for n, x in slots(optimizer).items()}
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.full((3,), 7.0)
    optimizer.add_param_group({"params": [extra]})
    create_slots(optimizer)
    assert not calls
    assert extra.grad.eq(7).all() and extra.eq(1).all()
    assert not optimizer.state[extra]["exp_avg"].any()
    now = slots(optimizer)
    assert all(now[n].equal(x) for n, x in before.items())


def test_names_and_order_of_state() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    create_slots(optimizer)
    found = state_of(model, optimizer)
    names = [s.name for s in found]
    assert names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert names[4:7] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert names[7:10] == [f"optim.0.weight.{s}" for s in ("step", "exp_avg", "exp_avg_sq")]
    assert [s.kind for s in found[:8]] == ["parameter"] * 4 + ["buffer"] * 3 + ["slot"]
    assert {s.owner for s in found[7:]} == set(names[:4])
    assert len(set(names)) == len(names)


def test_tied_weights_are_one_state_tensor() -> None:
    torch.manual_seed(0)
    model = GPT(tied=True)
    names = [s.name for s in state_of(model, None)]
    assert "embed.weight" in names and "head.weight" not in names
    captured = subject("gpt_tied").captured
    assert [n for n in captured.inputs if n.startswith("optim.head")] == []
    assert captured.updated.count("embed.weight") == 1


def test_optimizers_come_in_lists_and_dicts() -> None:
    model = mlp()
    parts = {
        "a": torch.optim.SGD(model.up.parameters(), lr=0.1),  # type: ignore[union-attr]
        "b": torch.optim.AdamW(model.head.parameters(), lr=0.2),  # type: ignore[union-attr]
    }
    names = {h.name: h.value for h in hypers_of(parts)}
    assert names["optim.0.lr"] == 0.1 and names["optim1.0.lr"] == 0.2
    assert names["optim1.0.betas.1"] == 0.999
    with pytest.raises(TuttiError, match=r"expected a torch\.optim\.Optimizer, got LambdaLR"):
        state_of(model, LambdaLR(parts["a"], lambda k: 1.0))


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.AdamW(mlp().parameters())
    with pytest.raises(CaptureError) as caught:
        state_of(mlp(), optimizer)
    assert "holds a parameter of shape [64, 16] that the model does not have" in str(caught.value)
    assert "model.parameters()" in caught.value.fix and caught.value.why
    assert caught.value.at.startswith(__file__)


def test_a_tensor_that_is_no_parameter_is_refused_with_its_own_fix() -> None:
    """A list of parameters would wrap it in another one."""
    model = mlp()
    plain = torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.Adam([plain])]
    with pytest.raises(CaptureError, match="optimizer 1, Adam updates a tensor of shape") as caught:
        state_of(model, optimizers)
    assert "weight = nn.Parameter(torch.zeros(1)) in place of the tensor" in caught.value.fix
    assert '{"net": model, "own": nn.ParameterList([weight])} as the model' in caught.value.fix


def _with_temperature(layout: str | None) -> list[Any]:
    """As the refusal of a plain tensor advises; the step reads the weight by a closure."""
    torch.manual_seed(0)
    net, weight = nn.Linear(4, 2).double(), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model = {"net": net, "own": nn.ParameterList([weight])}
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.Adam([weight], lr=0.1)]

    def train_step(model: Any, optimizers: Any, x: Tensor) -> Any:
        loss = (weight.exp().detach() * model["net"](x)).pow(2).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        temperature = -(weight.exp() * (loss.detach() - 1)).mean()
        optimizers[1].zero_grad()
        temperature.backward()
        optimizers[1].step()
        return loss.detach(), weight.exp().item()

    step: Any = partial(train_step, model, optimizers)
    if layout is not None:
        step = tutti.distribute(train_step, model, optimizers, layout)
    made = torch.Generator().manual_seed(0)
    return [step(torch.randn(4, 4, generator=made, dtype=torch.float64)) for _ in range(3)]


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_a_weight_in_a_dict_of_its_own(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(_with_temperature, layout, n=2):
        torch.testing.assert_close(found, _with_temperature(None), rtol=0, atol=1e-12)


SCHEDULES: dict[str, tuple[Any, Callable[[Any], LRScheduler]]] = {
    "lambda": (zoo.adamw, lambda o: LambdaLR(o, lambda k: 1 / (1 + k))),
    "one_cycle_betas": (zoo.adamw, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=6)),
    "one_cycle_momentum": (zoo.sgd, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=6)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_change_inputs_and_trace_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    capture = plain.capture
    monkeypatch.setattr(plain, "capture", lambda *a, **k: traces.append(1) or capture(*a, **k))
    make, schedule = SCHEDULES[name]
    model, twin = mlp(), mlp()
    ours, theirs = make(model), make(twin)
    first, second = schedule(ours), schedule(theirs)
    step = tutti.distribute(plain_step, model, ours, "")
    torch.manual_seed(1)
    batches = [vector_batch(0) for _ in range(4)]
    for batch in batches:
        loss, expected = step(*batch), plain_step(twin, theirs, *batch)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        first.step()
        second.step()
    assert len(traces) == 1
    assert len({h.value for h in hypers_of(ours)}) > 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-6)


def test_learning_rate_and_step_counts_are_inputs() -> None:
    captured = subject("adamw_loop").captured
    assert {"optim.0.lr", "optim.0.weight_decay", "optim.0.betas.0"} <= set(captured.inputs)
    for name in ("optim.0.lr", "optim.up.weight.step"):
        assert captured.placeholder(name).users, name
    assert "optim.up.weight.step" in captured.updated


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_numbers_of_an_optimizer_go_where_a_capturable_step_needs_them(kind: Any) -> None:
    """`meta` stands for a GPU. PyTorch has made them on the CPU, as by steps before the capture."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = kind([p])
    p.grad = torch.ones(3)
    optimizer.step()
    numbers = {k for k, x in optimizer.state[p].items() if isinstance(x, Tensor) and not x.dim()}
    place_counts(optimizer)
    assert {optimizer.state[p][k].device.type for k in numbers} == {"cpu"}
    elsewhere = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer.state[elsewhere] = optimizer.state.pop(p)
    optimizer.param_groups[0]["params"] = [elsewhere]
    place_counts(optimizer)
    assert numbers and {optimizer.state[elsewhere][k].device.type for k in numbers} == {"meta"}
