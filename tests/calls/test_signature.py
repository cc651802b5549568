"""A call that differs in what a trace depends on traces again; one that does not, does not."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = 1.0
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * self.gain


def _plain(model: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    scale = 1
    for i, r in enumerate(rest):
        scale = scale + (10 if r is True else r) * 3**i
    return model(x).sum() * scale


def _step() -> tuple[tutti.Step, Scaled, Tensor]:
    torch.manual_seed(0)
    model = Scaled().eval()
    return tutti.distribute(_plain, model), model, torch.randn(2, 4)


def test_constants_of_the_batch_are_told_apart_by_type_and_place() -> None:
    step, model, x = _step()
    for rest in ((1.0, 2), (2, 1.0), (True,), (1,), (1.0,), (2,)):
        assert float(step(x, *rest)) == pytest.approx(float(_plain(model, x, *rest)), rel=1e-6)
    # The second integer in a place makes an input of it.
    assert sum(map(len, step._programs.known.by_key.values())) == 5


def test_a_modules_plain_attribute_is_seen() -> None:
    step, model, x = _step()
    before = float(step(x))
    model.gain = 5.0
    assert float(step(x)) == pytest.approx(5 * before, rel=1e-6)
    model.train()
    assert float(step(x)) != pytest.approx(5 * before, rel=1e-3)  # dropout is on
    model.eval()
    assert float(step(x)) == pytest.approx(5 * before, rel=1e-6)
    assert sum(map(len, step._programs.known.by_key.values())) == 3


def test_an_attribute_that_becomes_something_equal_of_another_kind_is_seen() -> None:
    step, model, x = _step()
    before = float(step(x))
    model.gain = torch.tensor(1.0)  # equal, and another trace
    step(x)
    model.gain.fill_(3.0)
    assert float(step(x)) == pytest.approx(3 * before, rel=1e-6)


def test_no_tensor_is_kept_alive_by_the_signature() -> None:
    step, model, x = _step()
    step(x)
    model.seen = torch.zeros(3)
    gone = weakref.ref(model.seen)
    step(x)
    del model.seen
    assert gone() is None


def test_an_attribute_that_comes_and_goes_finds_the_old_trace() -> None:
    step, model, x = _step()
    step(x)
    model.extra = 3
    step(x)
    del model.extra
    step(x)
    assert sum(map(len, step._programs.known.by_key.values())) == 2


def test_an_attribute_that_moves_to_another_module_is_seen() -> None:
    """As many attributes as before, all modules together, and the same values in the same order."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()
            self.first.twice = True  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2 if hasattr(self.first, "twice") else x
            return x + 3 if hasattr(self.second, "twice") else x

    model = Halves()
    step, x = tutti.distribute(_plain, model), torch.randn(2, 4)
    for _ in range(2):
        assert float(step(x)) == pytest.approx(float(_plain(model, x)), rel=1e-6)
        del model.first.twice
        model.second.twice = True  # type: ignore[assignment]
        assert float(step(x)) == pytest.approx(float(_plain(model, x)), rel=1e-6)
        del model.second.twice
        model.first.twice = True  # type: ignore[assignment]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model.train()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x).square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_step_that_sets_the_mode_is_found_again_from_either(training: bool) -> None:
    """Training and evaluation by turns trace once from each mode at most, and leave the mode set."""
    torch.manual_seed(0)
    model = Scaled().train(training)
    step = tutti.distribute(_train, model, torch.optim.SGD(model.parameters(), lr=0.1))
    evaluate = tutti.distribute(_evaluate, model)
    x, traced = torch.randn(2, 4), []
    for _ in range(4):
        step(x)
        assert all(m.training for m in model.modules())
        found = float(evaluate(x))
        assert not any(m.training for m in model.modules())
        assert found == pytest.approx(
            float(_evaluate(model, x)), rel=1e-6
        )  # no dropout, these weights
        traced.append(
            [
                len({id(c) for v in s._programs.known.by_key.values() for c in v})
                for s in (step, evaluate)
            ]
        )
    assert traced[0] == [1, 1] and traced[1:] == [traced[1]] * 3 and max(traced[1]) <= 2


def test_a_module_whose_option_keeps_changing_is_warned_of() -> None:
    class Named(Scaled):
        kind = ""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * len(self.kind)

    model = Named().eval()
    step = tutti.distribute(_plain, model)
    with pytest.warns(UserWarning, match="traced 8 times"):
        for k in range(8):
            model.kind = "a" * k
            assert step(torch.ones(2, 4)).equal(_plain(model, torch.ones(2, 4)))


# --- what changes of the model itself -------------------------------------------------------------


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _freeze(model: Any, _: Any) -> None:
    model[0].weight.requires_grad_(False)


def _unfreeze(model: Any, _: Any) -> None:
    model[1].bias.requires_grad_(True)


def _hook(model: Any, _: Any) -> None:
    model[0].register_forward_hook(lambda module, args, out: 2 * out)


def _other_hook(model: Any, _: Any) -> None:
    model.handle.remove()
    model.handle = model[0].register_forward_hook(lambda module, args, out: 3 * out)


def _no_hook(model: Any, _: Any) -> None:
    model.handle.remove()


def _gradient_hook(model: Any, _: Any) -> None:
    model[0].weight.register_hook(lambda grad: 3 * grad)


def _step_hook(model: Any, optimizer: torch.optim.Optimizer) -> None:
    def double(*_: Any) -> None:
        model[0].weight.grad.mul_(2)

    optimizer.register_step_pre_hook(double)


def _forward(model: Any, _: Any) -> None:
    model[0].forward = lambda x: x * model[0].bias


def _append(model: Any, _: Any) -> None:
    model.append(nn.Tanh())


def _replace(model: Any, _: Any) -> None:
    model[2] = nn.Tanh()


def _double(model: Any, _: Any) -> None:
    model.double()


def _group(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def _clear(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


CHANGES = [
    _freeze, _unfreeze, _hook, _other_hook, _no_hook, _gradient_hook, _step_hook, _forward, _append, _replace,
    _double, _group, _clear,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__.strip("_"))
def test_a_change_of_the_model_is_seen(change: Any) -> None:
    """Between two steps, and the steps after it are those of plain PyTorch."""

    def losses(played: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sigmoid())
        model[1].bias.requires_grad_(False)
        model.handle = model[0].register_forward_hook(lambda module, args, out: out + 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
        step: Any = tutti.distribute(_trained, model, optimizer, "") if played else None
        found = []
        for k, x in enumerate(torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))):
            if k == 2:
                change(model, optimizer)
            x = x.to(model[0].weight.dtype)
            found.append(float(step(x) if played else _trained(model, optimizer, x)))
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def test_what_stays_is_traced_once() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.handle = model[0].register_forward_hook(lambda module, args, out: out + 1)
    step = tutti.distribute(_trained, model, torch.optim.SGD(model.parameters(), 0.5), "")
    other = nn.Linear(2, 2)
    for k in range(4):
        step(torch.ones(8, 4))
        other.register_forward_hook(lambda module, args, out: out)
        model[0].weight.requires_grad_(k % 2 == 0)
    assert (
        sum(map(len, step._programs.known.by_key.values())) == 2
    )  # with the weight frozen, and not


def test_plain_attributes_are_told_apart_by_type_and_name() -> None:
    step, model, x = _step()
    model.gain, model.other = 1.0, 2
    step(x)
    model.gain = 1
    step(x)
    model.gain, model.other = 2, 1
    assert float(step(x)) == pytest.approx(float(_plain(model, x)), rel=1e-6)
    assert sum(map(len, step._programs.known.by_key.values())) == 3


class Open(nn.Module):
    """Computes with whatever parameters, buffers and children it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        for k, part in enumerate((self, self.first, self.second)):
            for name, p in part.named_parameters(recurse=False):
                x = x * p + len(name) + k
            for name, b in part.named_buffers(recurse=False):
                x = x + b * len(name) + k
            for name, child in part.named_children():
                x = child(x) + len(name)
        return x


def _two() -> Tensor:
    return torch.full((4,), 2.0)


def a_first_buffer(m: Any) -> None:
    m.first.register_buffer("mean", _two())


def a_buffer_in_place_of_none(m: Any) -> None:
    m.mask = _two()


def a_first_parameter(m: Any) -> None:
    m.first.w = nn.Parameter(_two())


def another_name_of_a_parameter(m: Any) -> None:
    m.first.longer, m.first.w = m.first.w, None
    del m.first.w


def a_parameter_in_another_module(m: Any) -> None:
    m.second.longer = m.first.longer
    del m.first.longer


def a_first_child(m: Any) -> None:
    m.second.inner = nn.ReLU()


def another_name_of_a_child(m: Any) -> None:
    m.second.innermost = m.second.inner
    del m.second.inner


def test_names_of_parameters_buffers_and_children_are_seen() -> None:
    model: Any = Open()
    step, x = tutti.distribute(_plain, model), torch.randn(2, 4)
    changes = (a_first_buffer, a_buffer_in_place_of_none, a_first_parameter)
    later = (another_name_of_a_parameter, a_parameter_in_another_module)
    for change in (*changes, *later, a_first_child, another_name_of_a_child):
        step(x)
        change(model)
        expected = float(_plain(model, x).detach())
        assert float(step(x)) == pytest.approx(expected, rel=1e-6), change.__name__


def test_a_buffer_of_another_form_is_seen() -> None:
    def halved(model: nn.Module, x: Tensor) -> Tensor:
        scale = model.first.scale
        return torch.ones_like(scale).div(2).sum() * scale.numel() + x.sum()

    model: Any = Open()
    model.first.register_buffer("scale", torch.ones(4))
    step, x = tutti.distribute(halved, model), torch.zeros(2, 4)
    for scale in (torch.ones(4), torch.ones(4).double(), torch.ones(1).double()):
        model.first.scale = scale
        found, expected = step(x), halved(model, x)
        assert found.dtype is expected.dtype
        assert float(found) == float(expected)
