"""Batches of many lengths: few traces, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from small_steps import trained
from tutti.calls import captures
from tutti.modes import plain as one_program

LENGTHS = (8, 12, 16, 10, 1, 14, 8, 40)
Step = Callable[..., Any]


def model_of(rest: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(32, 8), rest or nn.GELU(), nn.Linear(8, 32)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / tokens.shape[1]


def batches_of(lengths: Iterable[int]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(32, (4, length)) for length in lengths]


def losses_of(
    step_of: Callable[[], tuple[Step, nn.Module]], lengths: Iterable[int], *, plain: bool = False
) -> tuple[list[Any], int, int]:
    """What a step returns for batches of many lengths; how often it was traced as is, and with symbols."""
    step, model = step_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    called = tutti.distribute(step, model, optimizer, "") if not plain else None
    with mock.patch.object(one_program, "capture", wraps=one_program.capture) as traced:
        found = [called(x) if called else step(model, optimizer, x) for x in batches_of(lengths)]
    free = [bool(call.kwargs["free"]) for call in traced.mock_calls]
    return [float(x) for x in found], free.count(False), free.count(True)


def as_eager(step_of: Callable[[], tuple[Step, nn.Module]], *lengths: int) -> tuple[int, int]:
    """Asserts the numbers of plain PyTorch; gives how often the step was traced."""
    expected, *_ = losses_of(step_of, lengths, plain=True)
    found, static, free = losses_of(step_of, lengths)
    assert found == pytest.approx(expected, rel=1e-10)
    return static, free


def test_three_traces_serve_all_lengths_but_one() -> None:
    # Lengths of 1 are traced as they are.
    assert as_eager(lambda: (trained(loss_of), model_of()), *LENGTHS) == (3, 1)


def test_dropout_draws_what_a_trace_of_that_length_draws() -> None:
    def step_of() -> tuple[Step, nn.Module]:
        return trained(loss_of), model_of(nn.Dropout(0.4))

    found, static, free = losses_of(step_of, LENGTHS)
    with mock.patch.object(captures, "MOST_FAILURES", 0):
        expected, every, none = losses_of(step_of, LENGTHS)
    assert found == expected
    assert (static, free, every, none) == (3, 1, 7, 0)


def test_both_sides_of_a_branch_get_a_trace() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return loss_of(model, x) * (2 if x.shape[1] > 10 else 1)

    # 4 and 12 as they are; 6 with symbols for those to 10, 14 for those above.
    lengths = 4, 6, 8, 12, 14, 16, 9, 20
    assert as_eager(lambda: (trained(loss), model_of()), *lengths)[1] <= 3


def test_a_trace_takes_the_branch_of_the_last_call() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = loss_of(model, x)
        return found * 2 if found < 100 else found

    # Only the first call tries the other one before.
    assert as_eager(lambda: (trained(loss), model_of()), 8, 12)[0] == 3


def test_a_loop_over_the_length_is_traced_for_each() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return sum((loss_of(model, x[:, : i + 1]) for i in range(x.shape[1])), torch.zeros(()))

    assert as_eager(lambda: (trained(loss), model_of()), 4, 5, 6, 7) == (4, 2)


def test_counts_of_tokens_go_on() -> None:
    def step_of() -> tuple[Step, nn.Module]:
        seen = {"tokens": 0, "last": 0}

        def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
            loss = trained(loss_of)(model, optimizer, x)
            seen["tokens"] += x.numel()
            last, seen["last"] = seen["last"], x.shape[1]
            return loss + seen["tokens"] + last

        return step, model_of()

    as_eager(step_of, *LENGTHS)


def test_another_constant_is_another_trace() -> None:
    def step_of() -> tuple[Step, nn.Module]:
        options = {"kind": "plain"}

        def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
            loss = trained(loss_of)(model, optimizer, x)
            return loss if options["kind"] == "plain" else loss * 2

        step.options = options  # type: ignore[attr-defined]
        return step, model_of()

    def run(*, plain: bool) -> list[float]:
        step, model = step_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = tutti.distribute(step, model, optimizer, "")
        found = []
        for k, x in enumerate(batches_of(LENGTHS)):
            step.options["kind"] = "plain" if k % 3 else "twice"  # type: ignore[attr-defined]
            found.append(float(step(model, optimizer, x) if plain else called(x)))
        return found

    assert run(plain=False) == pytest.approx(run(plain=True), rel=1e-10)


def test_modes_that_a_step_sets_are_set() -> None:
    def step_of() -> tuple[Step, nn.Module]:
        model = model_of(nn.Dropout(0.5))

        def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
            model.eval()
            return trained(loss_of)(model, optimizer, x)

        return step, model

    step, model = step_of()
    called = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), "")
    for x in batches_of((4, 6, 8)):
        model.train()
        called(x)
        assert not model.training and not model[1].training  # type: ignore[index]


def test_numbers_that_change_are_inputs_of_all_lengths() -> None:
    def run(*, plain: bool) -> list[float]:
        step, model = trained(loss_of), model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = tutti.distribute(step, model, optimizer, "")
        found = []
        for k, x in enumerate(batches_of(LENGTHS)):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (k > 3)
            found.append(float(step(model, optimizer, x) if plain else called(x)))
        return found

    assert run(plain=False) == pytest.approx(run(plain=True), rel=1e-10)
