"""Whole numbers that a step looks up in sets and dicts: a program for members, one for all others."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.capture.python.looked_up import MOST_KEYS

CALLS = 14
EVALUATED = {3, 5, 9}
RATES = {2: 0.5, 7: 0.25}
COUNTS = Counter([3, 3, 5])
MANY = {*range(3, 4 * MOST_KEYS + 4, 4)}
MIXED: set[Any] = {3, "last", (1, 2)}
STAGES: dict[int, float] = defaultdict(lambda: 2.0, {4: 3.0})


class _Settings:
    __slots__ = ("evaluated",)

    def __init__(self) -> None:
        self.evaluated = {3, 5, 9}


class _Trainer:
    def __init__(self) -> None:
        self.seen, self.settings = 0, _Settings()


def _global(trainer: _Trainer, n: int) -> float:
    return 2.0 if n in EVALUATED else 1.0


def _constant(trainer: _Trainer, n: int) -> float:
    return 2.0 if n + 1 not in {3, 5, 9} else 1.0


def _attribute(trainer: _Trainer, n: int) -> float:
    return 2.0 if n in trainer.settings.evaluated else 1.0


def _local(trainer: _Trainer, n: int) -> float:
    wanted = {k for k in range(9) if k % 4 == 0}
    return sum(1.0 for k in (1, 2) if n * k in wanted)


def _count(trainer: _Trainer, n: int) -> float:
    return 2.0 if trainer.seen in RATES else 1.0


def _got(trainer: _Trainer, n: int) -> float:
    return RATES.get(n, 1.0) + RATES.get(n + 1, len("two"))


def _item(trainer: _Trainer, n: int) -> float:
    return RATES[n] if n in RATES else COUNTS[n] + 1.0


def _compared_later(trainer: _Trainer, n: int) -> float:
    return 2.0 if n in EVALUATED and n == 5 else 1.0


CASES: list[tuple[Callable[[_Trainer, int], float], int]] = [
    (_global, 3),
    (_constant, 3),
    (_attribute, 3),
    (_local, 5),
    (_count, 3),
    (_got, 6),
    (_item, 6),
    (_compared_later, 5),
]


def _weight(factor: Callable[[_Trainer, int], float], layout: str | None) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    model, trainer = nn.Linear(3, 1).double(), _Trainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Any, x: Tensor, n: int) -> Tensor:
        trainer.seen += 1
        loss = (model(x) * factor(trainer, n) + 0.01 * trainer.seen).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = train
    if layout is not None:
        step = tutti.distribute(train, model, optimizer, layout)
    for k in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).double()
        step(x, k) if layout is not None else step(model, optimizer, x, k)
    assert trainer.seen == CALLS
    return model.weight.detach(), step


@pytest.mark.parametrize("factor, most", CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_members_and_all_others_share_programs(
    factor: Callable[[_Trainer, int], float], most: int
) -> None:
    expected, _ = _weight(factor, None)
    found, step = _weight(factor, "")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert step._num_traces <= most


def _among_tuples(trainer: _Trainer, n: int) -> float:
    return 2.0 if n in MIXED else 1.0


def _pair(trainer: _Trainer, n: int) -> float:
    return 2.0 if (1, n) in MIXED else 1.0


def _made(trainer: _Trainer, n: int) -> float:
    return STAGES[n]


def _of_a_set(trainer: _Trainer, n: int) -> float:
    return float(len({n, 5}))


@pytest.mark.parametrize("factor", [_among_tuples, _pair, _made, _of_a_set])
def test_another_hash_makes_a_constant_of_its_number_alone(
    factor: Callable[[_Trainer, int], float],
) -> None:
    STAGES.clear()
    expected, _ = _weight(factor, None)
    STAGES.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, _ = _weight(factor, "")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (warning,) = [str(w.message) for w in said if "has been traced" in str(w.message)]
    named = "STAGES" if factor is _made else "arguments['n']"
    assert f"another value of {named}" in warning


def test_a_number_is_not_compared_with_very_many_keys() -> None:
    def factor(trainer: _Trainer, n: int) -> float:
        return 2.0 if n in MANY else 1.0

    expected, _ = _weight(factor, None)
    found, step = _weight(factor, "")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert step._num_traces == CALLS
