"""Numbers beyond a type's range: NaN and infinity where one device has them, and said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.errors import TuttiError


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def under_autocast(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = out.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(dtype: torch.dtype, scale: float) -> Tensor:
    torch.manual_seed(1)
    return (torch.randn(8, 4) * scale).to(dtype)


def ends(
    layout: str | None, dtype: torch.dtype, scale: float
) -> tuple[list[list[bool]], list[str]]:
    """Which losses and which entries of the weights are finite after two steps, and what was said."""
    model, optimizer = made(dtype)
    mixed = layout is not None and "bf16" in layout
    plain = under_autocast if dtype == torch.float32 else train_step
    played = tutti.distribute(train_step, model, optimizer, layout) if layout is not None else None
    x = batch(dtype, scale)
    assert not mixed or dtype == torch.float32
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [(played(x) if played else plain(model, optimizer, x)) for _ in range(2)]
    weights = [*(played.model_state() if played else model.state_dict()).values()]
    finite = [[bool(torch.isfinite(loss)) for loss in losses]]
    finite += [torch.isfinite(w).flatten().tolist() for w in weights]
    return finite, [str(w.message) for w in said if "returned" in str(w.message)]


CASES = [
    (torch.bfloat16, "", 3e38),
    (torch.bfloat16, "", 1e19),
    (torch.float16, "", 6e4),
    (torch.float32, "precision=bf16", 3e38),
    (torch.float32, "precision=bf16", 1e19),
]


@pytest.mark.parametrize(("dtype", "layout", "scale"), CASES)
def test_what_is_beyond_the_range_is_as_eagerly_and_is_said(
    dtype: torch.dtype, layout: str, scale: float
) -> None:
    expected, _ = ends(None, dtype, scale)
    found, said = ends(layout, dtype, scale)
    assert found == expected
    assert not all(found[0]) and "returned nan" in said[0] and "TUTTI_CHECK_NAN=1" in said[0]


@pytest.mark.parametrize(("dtype", "layout", "scale"), [CASES[0], CASES[3]])
def test_ranks_agree_about_it(ranks: Ranks, dtype: torch.dtype, layout: str, scale: float) -> None:
    expected, _ = ends(None, dtype, scale)
    for found, said in ranks.run(ends, f"data=2 {layout}".strip(), dtype, scale, n=2):
        assert found == expected and said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_node_is_named(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the state is as it was."""
    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    model, optimizer = made(dtype)
    layout = "precision=bf16" if dtype == torch.float32 else ""
    played = tutti.distribute(train_step, model, optimizer, layout)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TuttiError, match="made NaN or infinity of finite values at step 0") as said:
        played(batch(dtype, 1e30))
    assert "test_overflow.py" in str(said.value)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old)
