"""Gradients of earlier calls: what does not matter is captured, and what does is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.weak import WeakIdKeyDictionary

import tutti
from tutti.capture.step import capture
from tutti.errors import CaptureError

pytestmark = pytest.mark.usefixtures("in_float64")

Step = Callable[..., Any]


def mlp(out: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out))


def two_parts() -> nn.ModuleDict:
    return nn.ModuleDict({"g": mlp(), "d": mlp(1)})


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def one_each(model: Any) -> dict[str, AdamW]:
    return {k: adamw(model[k]) for k in "gd"}


def batch(k: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(k)
    return torch.randn(8, 4, generator=made), torch.randn(8, 4, generator=made)


def judged(x: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.full_like(x, float(real)))


def dcgan(m: Any, o: Any, z: Tensor, x: Tensor) -> Tensor:
    m["d"].zero_grad()
    real = judged(m["d"](x), True)
    real.backward()
    fake = m["g"](z)
    judged(m["d"](fake.detach()), False).backward()
    o["d"].step()
    m["g"].zero_grad()
    loss = judged(m["d"](fake), True)
    loss.backward()
    o["g"].step()
    return loss


def generator_first(m: Any, o: Any, z: Tensor, x: Tensor) -> Tensor:
    o["g"].zero_grad()
    fake = m["g"](z)
    judged(m["d"](fake), True).backward()
    o["g"].step()
    o["d"].zero_grad(set_to_none=False)
    loss = judged(m["d"](x), True) + judged(m["d"](fake.detach()), False)
    loss.backward()
    o["d"].step()
    return loss


def loss_of(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x), y)


def cleared_at_the_end(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    o.step()
    o.zero_grad()
    return loss


def zeros_at_the_end(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    o.zero_grad(set_to_none=False)
    return loss


def zeros_at_the_top(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad(set_to_none=False)
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    return loss


def zeros_in_place(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    return loss


def zeros_in_data(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.data.zero_()
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    return loss


def by_hand(m: nn.Module, _o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            grad = p.grad
            assert grad is not None
            p -= 0.1 * grad
            grad.zero_()
    return loss


def set_anew(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    params = list(m.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g.clamp(-0.1, 0.1)
    o.step()
    return loss


def in_two_backwards(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad()
    loss_of(m, x[:4], y[:4]).backward()
    loss = loss_of(m, x[4:], y[4:])
    loss.backward()
    o.step()
    return loss


def zeros_between(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    """The second update has zeros for gradients, not none: weights decay."""
    o.zero_grad()
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    o.zero_grad(set_to_none=False)
    o.step()
    return loss


def zeros_of_another_backward(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
    """The weights of the first layer decay, but not at the first call."""
    o.zero_grad(set_to_none=False)
    m[2](x.repeat(1, 2)[:, :6]).square().mean().backward()
    o.step()
    loss = loss_of(m, x, y)
    loss.backward()
    return loss


def of_the_head(m: Any) -> SGD:
    return SGD(m[2].parameters(), lr=0.1)


def with_spare() -> nn.Module:
    """A parameter that no backward reaches: it has no gradient, at any call."""
    m = mlp()
    m.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return m


def plain(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad()
    loss = loss_of(m, x, y)
    loss.backward()
    o.step()
    return loss


CAPTURED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Step]] = {
    "dcgan": (two_parts, one_each, dcgan),
    "generator first": (two_parts, one_each, generator_first),
    "cleared at the end": (with_spare, adamw, cleared_at_the_end),
    "zeros at the end": (with_spare, adamw, zeros_at_the_end),
    "zeros at the top": (with_spare, adamw, zeros_at_the_top),
    "zeros in place": (with_spare, adamw, zeros_in_place),
    "zeros in data": (with_spare, adamw, zeros_in_data),
    "by hand": (mlp, adamw, by_hand),
    "set anew": (mlp, adamw, set_anew),
    "in two backwards": (mlp, adamw, in_two_backwards),
    "zeros between": (mlp, adamw, zeros_between),
    "zeros of another backward": (mlp, adamw, zeros_of_another_backward),
    "nobody reads": (mlp, of_the_head, plain),
}


def same(
    make: Callable[[], Any],
    optimizer: Callable[[Any], Any],
    step: Step,
    prepare: Callable[[Any], Any] = lambda m: None,
) -> tutti.Step:
    """Assert that a captured step does what the plain one does, five times."""
    mine = make()
    theirs = copy.deepcopy(mine)
    for m in (mine, theirs):
        prepare(m)
    distributed, other = tutti.distribute(step, mine, optimizer(mine), ""), optimizer(theirs)
    for k in range(5):
        loss, expected = distributed(*batch(k)), step(theirs, other, *batch(k))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-12)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-10)
    return distributed


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_cleared_or_not_read_does_not_matter(name: str) -> None:
    make, optimizer, step = CAPTURED[name]
    graph = same(make, optimizer, step).program.captured.graph
    assert not [n for n in graph.nodes if "left_gradient" in str(n.target)]


def test_two_steps_on_one_model() -> None:
    """Each leaves gradients that the other clears, or does not read."""

    def first(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(m["g"](x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    def second(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = m["d"](m["g"](x)).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        return loss

    mine = two_parts()
    theirs = copy.deepcopy(mine)
    steps = [
        tutti.distribute(f, mine, adamw(m), "") for f, m in ((first, mine["g"]), (second, mine))
    ]
    others = [(first, adamw(theirs["g"])), (second, adamw(theirs))]
    for k in range(3):
        for step, (f, o) in zip(steps, others, strict=True):
            assert torch.allclose(step(*batch(k)), f(theirs, o, *batch(k)), rtol=1e-9)


def accumulating(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    loss.backward()  # added here
    o.step()
    return loss


def only_adding(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(m, x, y)
    loss.backward()  # added here
    return loss


def reading_first(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    before = sum(p.grad.square().sum() for p in m.parameters() if p.grad is not None)  # read here
    return plain(m, o, x, y) + before


def clipping_all(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad()
    loss = loss_of(m, x, y)
    loss.backward()  # added here
    nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    o.step()
    return loss


def returning(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(m, x, y)
    loss.backward()  # added here
    return [p.grad for p in m.parameters()]


def shrinking(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.mul_(0.9)  # read here
    return accumulating(m, o, x, y)


REFUSED: dict[str, tuple[Step, Callable[[Any], Any], str, str]] = {
    "never cleared": (accumulating, adamw, "# added here", 'of "0.weight" and 3 more'),
    "no optimizer reads": (only_adding, adamw, "# added here", 'of "0.weight" and 3 more'),
    "read before": (reading_first, adamw, "# read here", 'of "0.weight" and 3 more'),
    "clipped": (clipping_all, of_the_head, "# added here", 'of "0.weight" and 1 more'),
    "returned": (returning, adamw, "# added here", 'of "0.weight" and 3 more'),
    "decayed": (shrinking, adamw, "# added here", 'of "0.weight" and 3 more'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_earlier_call_left_is_refused(name: str) -> None:
    step, optimizer, line, whose = REFUSED[name]
    model = mlp()
    with pytest.raises(CaptureError, match="gradients that an earlier call left") as caught:
        capture(step, model, optimizer(model), batch(0))
    assert whose in caught.value.what
    assert line in caught.value.at and "test_gradients.py:" in caught.value.at
    assert caught.value.why and "model.zero_grad()" in caught.value.fix
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_without_an_optimizer_somebody_else_would_read() -> None:
    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(m, x, y)
        loss.backward()
        return loss

    with pytest.raises(CaptureError, match="adds to gradients that an earlier call left"):
        capture(step, mlp(), None, batch(0))


def test_cleared_at_every_other_call() -> None:
    def step(m: nn.Module, o: Any, x: Tensor, y: Tensor, first: bool) -> Tensor:
        loss = loss_of(m, x, y)
        loss.backward()
        if not first:
            o.step()
            o.zero_grad()
        return loss

    model = mlp()
    optimizer = adamw(model)
    with pytest.raises(CaptureError, match="adds to gradients that an earlier call left"):
        capture(step, model, optimizer, (*batch(0), True))


def test_gradients_that_were_there_before() -> None:
    model = mlp()
    optimizer = adamw(model)
    loss_of(model, *batch(1)).backward()
    with pytest.raises(CaptureError, match="adds to gradients that an earlier call left"):
        capture(cleared_at_the_end, model, optimizer, batch(0))
    capture(plain, model, optimizer, batch(0))
    capture(zeros_in_place, model, optimizer, batch(0))


def test_an_optimizer_that_was_not_given() -> None:
    model = mlp()
    other = of_the_head(model)

    def step(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = plain(m, o, x, y)
        other.step()  # here
        return loss

    with pytest.raises(CaptureError, match="an optimizer that it was not given") as caught:
        capture(step, model, SGD(model.parameters(), lr=0.1), batch(0))
    assert "# here" in caught.value.at


def masked(m: Any) -> None:
    mask = (torch.arange(6) % 2).double()[:, None]
    m[0].weight.register_hook(lambda g: g * mask)
    m[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    m[2].bias.register_hook(lambda g: None)


def normed(m: Any) -> None:
    def after(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(p.grad.norm() + 1e-6)

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(after)


@pytest.mark.parametrize("prepare", [masked, normed])
@pytest.mark.parametrize("step", [plain, in_two_backwards, cleared_at_the_end])
def test_gradient_hooks(prepare: Callable[[Any], None], step: Step) -> None:
    same(mlp, adamw, step, prepare)


@pytest.mark.parametrize("prepare", [masked, normed])
def test_verify_plays_gradient_hooks(prepare: Callable[[Any], None]) -> None:
    model = mlp()
    prepare(model)
    found = tutti.verify(plain, model, adamw(model), batch(0), "data=2")
    assert found.ok, str(found)
    now = [hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()]
    assert len(now) == (3 if prepare is masked else 0)


def test_verify_sees_hooks_that_a_capture_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    masked(model)
    monkeypatch.setattr("tutti.capture.lifted_step.hooked", lambda *_: nullcontext())
    assert not tutti.verify(plain, model, adamw(model), batch(0), "").ok


def test_updates_inside_the_backward() -> None:
    """Each parameter's optimizer steps in its hook, found by name."""

    def make(m: nn.Module) -> dict[str, SGD]:
        found = {n: SGD([p], lr=0.1, momentum=0.9) for n, p in m.named_parameters()}

        def after(n: str) -> Callable[[Tensor], None]:
            def update(_: Tensor) -> None:
                found[n].step()
                found[n].zero_grad()

            return update

        for n, p in m.named_parameters():
            p.register_post_accumulate_grad_hook(after(n))
        return found

    def step(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(m, x, y)
        loss.backward()
        return loss

    same(mlp, make, step)


def test_a_hook_that_looks_its_parameter_up() -> None:
    def prepare(model: nn.Module) -> None:
        scales = {p: 0.5 + k for k, p in enumerate(model.parameters())}

        def scaled(p: Tensor) -> None:
            p.grad.mul_(scales[p])  # type: ignore[index,union-attr]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(scaled)

    same(mlp, adamw, plain, prepare)


def test_a_hook_that_looks_up_what_a_trace_cannot_replace() -> None:
    model = mlp()
    scales = WeakIdKeyDictionary(dict.fromkeys(model.parameters(), 0.5))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(scales[p]))  # type: ignore[index]
    with pytest.raises(CaptureError, match=r'a gradient hook of "2\.bias" looks up') as caught:
        capture(plain, model, adamw(model), batch(0))
    assert "test_gradients.py:" in caught.value.at and "by name" in caught.value.fix


@pytest.mark.parametrize("decoder", [False, True])
def test_a_causal_mask_of_pytorchs_transformers(decoder: bool) -> None:
    def make() -> nn.Module:
        if decoder:
            return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 1)

    def step(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.repeat(4, 2).reshape(4, 8, 8), y.repeat(4, 2).reshape(4, 8, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        out = m(x, y, tgt_mask=mask) if decoder else m(x, mask=mask)
        loss = (out - y).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.detach()

    same(make, lambda m: SGD(m.parameters(), lr=0.1), step)
