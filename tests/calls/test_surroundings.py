"""Calls within autocast, without gradients, or with another default dtype: as plain PyTorch there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks

Around = Callable[[], AbstractContextManager[Any]]


def cast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _batch(k: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(k), dtype=torch.float32)


def fit(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def states(model: Any, x: Tensor) -> tuple[Tensor, bool]:
    return model(x) + torch.ones(4), torch.is_grad_enabled()


def trained(layout: str | None, around: list[bool]) -> tuple[list[Tensor], int]:
    """The losses of calls in and outside of autocast, and the number of traces."""
    model, optimizer = _built()
    step: Any = tutti.distribute(fit, model, optimizer, layout=layout) if layout else None
    found = []
    for k, inside in enumerate(around):
        with cast() if inside else nullcontext():
            given = (_batch(k),) if layout else (model, optimizer, _batch(k))
            found.append((step or fit)(*given).detach())
    return found, step._num_traces if layout else 0


@pytest.mark.parametrize("first", [True, False])
def test_one_device_casts_as_plain_pytorch(first: bool) -> None:
    around = [first, not first, first, not first]
    expected, _ = trained(None, around)
    made, traces = trained("data=1", around)
    assert [x.dtype for x in made] == [x.dtype for x in expected]
    torch.testing.assert_close(made, expected, rtol=1e-2, atol=1e-3)
    assert traces == 2


def test_ranks_cast_as_plain_pytorch(ranks: Ranks) -> None:
    around = [True, False, True]
    expected, _ = trained(None, around)
    for made, _ in ranks.run(trained, "data=2 zero=3", around, n=2):
        assert [x.dtype for x in made] == [x.dtype for x in expected]
        torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_evaluation_sees_the_mode_of_gradients(around: Around) -> None:
    model, _ = _built()
    step = tutti.distribute(states, model, None)
    for k, inside in enumerate((nullcontext, around, nullcontext)):
        with inside():
            made, expected = step(_batch(k)), states(model, _batch(k))
        assert torch.equal(made[0], expected[0])
        assert made[1] == expected[1]


def test_a_step_sees_the_default_dtype() -> None:
    model, _ = _built()
    step = tutti.distribute(states, model, None)
    before = torch.get_default_dtype()
    try:
        for k, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
            torch.set_default_dtype(dtype)
            made, expected = step(_batch(k)), states(model, _batch(k))
            assert made[0].dtype == expected[0].dtype
            assert torch.equal(made[0], expected[0])
    finally:
        torch.set_default_dtype(before)


def measures(model: Any, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """As torchvision's references measure accuracy: views in inference mode."""
    y = model(x)
    with torch.inference_mode():
        _, best = y.topk(2, 1)
        hits = best.t().eq(torch.arange(8)[None] % 4)
        share = hits[:1].flatten().sum(dtype=torch.float32) / 8
        inside = torch.is_grad_enabled()
    return y.sum() * share.item(), share, inside


@pytest.mark.parametrize("layout", ["data=1", "data=2 zero=3"])
def test_a_step_takes_views_in_inference_mode(ranks: Ranks, layout: str) -> None:
    model, _ = _built()
    expected = [measures(model, _batch(k)) for k in range(3)]
    found = ranks.run(measured, layout, n=2) if "2" in layout else [measured(layout)]
    for made in found:
        for mine, one in zip(made, expected, strict=True):
            torch.testing.assert_close(mine[:2], (one[0].detach(), one[1]))
            assert mine[2] == one[2]


def measured(layout: str) -> list[Any]:
    """What three calls return."""
    step = tutti.distribute(measures, _built()[0], None, layout=layout)
    return [tuple(step(_batch(k))) for k in range(3)]
