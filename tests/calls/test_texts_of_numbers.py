"""Numbers that a step writes into texts: labels, or keys and names on which its results depend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks

CALLS = 6
LOG: dict[str, float] = {}
SCALES = {f"at {10**k}": 1.0 + k for k in range(CALLS)}


class Trainer:
    """Counts its steps."""

    def __init__(self) -> None:
        self.count = 1


def updated(optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


# Steps whose results depend on the text of a number.


def of_length(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return updated(o, loss_of(m, x, y) * len(f"step {it}"))


def of_str(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return updated(o, loss_of(m, x, y) * len(str(it)))


def of_percent(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return updated(o, loss_of(m, x, y) * len("%s" % it))  # noqa: UP031


def looked_up(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return updated(o, loss_of(m, x, y) * SCALES[f"at {it}"])


def key_of_result(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return {f"loss {it}": updated(o, loss_of(m, x, y))}


def result(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    return updated(o, loss_of(m, x, y)), f"step {it:06d}"


def key_of_log(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    loss = updated(o, loss_of(m, x, y))
    LOG[f"loss {it}"] = loss.item()
    return loss


def of_own_count(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    t.count *= 10
    return updated(o, loss_of(m, x, y) * len(f"{t.count}"))


DEPENDING = (
    of_length,
    of_str,
    of_percent,
    looked_up,
    key_of_result,
    result,
    key_of_log,
    of_own_count,
)


# Labels.


def recorded(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    with torch.autograd.profiler.record_function(f"step {it}"):
        return updated(o, loss_of(m, x, y))


def printed(m: nn.Module, o: Any, t: Trainer, x: Tensor, y: Tensor, it: int) -> Any:
    if it < 0:
        print(f"{it:.2f}")
    print("step", it, f"{it / 3:.3f}")
    return updated(o, loss_of(m, x, y) / it)


LABELS = (recorded, printed)


def run(step: Callable[..., Any], layout: str | None) -> tuple[list[Any], int]:
    """The results and the weights at the end; the number of traces."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, it: int) -> Any:
        return step(model, optimizer, trainer, x, y, it)

    made = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    LOG.clear()
    found: list[Any] = []
    for k in range(CALLS):
        given = torch.Generator().manual_seed(k)
        x = torch.randn(8, 8, generator=given, dtype=torch.float64)
        y = torch.randn(8, 4, generator=given, dtype=torch.float64)
        found.append(made(x, y, 10**k) if made else train_step(model, optimizer, x, y, 10**k))
    with tutti.whole(model):
        found += [trainer.count, dict(LOG), *(p.detach().clone() for p in model.parameters())]
    return found, made._num_traces if made else 0


def of_depending(at: int, layout: str | None) -> list[Any]:
    return run(DEPENDING[at], layout)[0]


def _flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [*x, *_flat([*x.values()])]
    return [z for y in x for z in _flat(y)] if isinstance(x, list | tuple) else [x]


def _same(found: Any, expected: Any) -> None:
    for a, b in zip(_flat(found), _flat(expected), strict=True):
        if isinstance(b, Tensor | float):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        else:
            assert a == b


@pytest.mark.parametrize("at", range(len(DEPENDING)))
def test_a_number_in_a_text_on_which_results_depend_is_a_constant(at: int) -> None:
    _same(of_depending(at, ""), of_depending(at, None))


@pytest.mark.parametrize("step", LABELS)
def test_labels_need_no_further_trace(step: Callable[..., Any]) -> None:
    found, num_traces = run(step, "")
    _same(found, run(step, None)[0])
    assert num_traces == 2


def test_on_ranks(ranks: Ranks) -> None:
    for at in (0, 4, 6):
        for found in ranks.run(of_depending, at, "data=2", n=2):
            _same(found, of_depending(at, None))


def test_a_float_in_a_text_on_which_results_depend_is_refused() -> None:
    model = nn.Linear(8, 4)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, scale: float) -> Tensor:
        return updated(optimizer, model(x).square().mean() * len(f"{scale:.1f}"))  # the text

    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    with pytest.raises(tutti.CaptureError, match=r"text of a float.*\n.*the text"):
        step(torch.randn(2, 8), 0.5)
