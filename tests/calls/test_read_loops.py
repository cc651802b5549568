"""Loops that end by a value of a tensor: a trace does not know it, and must end all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import looping_programs
import reading_programs as programs
import tutti
from looping_programs import LOOPING
from python_programs import mlp
from tutti.capture.python import loop_reads, other_ways

Forward = Callable[[nn.Module, Tensor], Any]


def played(forward: Forward) -> tutti.Step:
    return tutti.distribute(forward, mlp(), None, "")


def assert_same(forward: Forward, num_calls: int = 4) -> None:
    step, model = played(forward), mlp()
    for k in range(num_calls):
        x = programs.batch(k) * 4**k
        expected = torch.as_tensor(forward(model, x), dtype=torch.float64)
        torch.testing.assert_close(torch.as_tensor(step(x), dtype=torch.float64), expected)


@pytest.mark.parametrize("name", LOOPING)
def test_a_known_number_of_turns_is_not_traced_again(name: str) -> None:
    forward = getattr(looping_programs, name)
    step = played(forward)
    for _ in range(2):
        before = step._num_traces
        for k in (0, 3, 1):
            torch.testing.assert_close(step(programs.batch(k)), forward(mlp(), programs.batch(k)))
    assert step._num_traces == before


def nested(m: nn.Module, x: Tensor) -> Tensor:
    y, total = m(x), x.new_zeros(())
    for k in range(3):
        while True:
            y = y * 0.5
            if y.abs().max() < 0.3**k:
                break
            z = y
            while z.abs().max() > 0.2**k:
                z = z * 0.5
            total = total + z.sum()
    return total + y.sum()


def counts(m: nn.Module, x: Tensor) -> Tensor:
    n = (m(x) > 0).sum()
    while n.item() < 30:
        n = n + 3
    return n


def all_small(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)[0]
    while max(y.tolist()) > 0.1:
        y = y * 0.5
    return y.sum()


def powers(m: nn.Module, x: Tensor) -> Tensor:
    """The next turn uses the number, of which a guess below zero would be no power."""
    y = m(x)
    for _ in range(10_000):
        error = y.abs().max().item()
        y = y * min(0.9, 0.9 / (1 + error) ** (1 / 5) / error**0.1)
        if error < 0.2:
            break
    return y.sum()


def recursive(m: nn.Module, x: Tensor) -> Tensor:
    def halved(y: Tensor) -> Tensor:
        return y if y.abs().max() < 0.1 else halved(y * 0.5)

    return halved(m(x)).sum()


def catches_errors(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    while True:
        try:
            y = y * 0.5
            if y.abs().max() < 0.1:
                return y.sum()
        except Exception:  # noqa: S110
            pass


@pytest.mark.parametrize("forward", [nested, counts, all_small, powers, recursive, catches_errors])
def test_loops_of_other_forms(forward: Forward) -> None:
    assert_same(forward)


def test_a_short_loop_of_branches_is_no_loop_without_an_end() -> None:
    """All rows are read at one line, alike: one trace for them, another for what they are."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        rows = m(x.repeat(5, 1))
        return sum((y.sum() for y in rows if y[0] < 50), x.new_zeros(()))

    step = played(forward)
    torch.testing.assert_close(step(programs.batch(0)), forward(mlp(), programs.batch(0)))
    assert step._num_traces == 2


def never(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    while True:
        y = y * 0.5
        if y.max() > 1e9:
            return y


def has_no_exit(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    while True:
        y = torch.tanh(y)
        if y.max() > 1e9:
            y = y + 1


@pytest.mark.parametrize("forward", [never, has_no_exit])
def test_a_loop_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    monkeypatch.setattr(loop_reads, "_MOST_WORK", 2_000)
    with pytest.raises(tutti.CaptureError, match="a loop without an end") as caught:
        played(forward)(programs.batch(0))
    assert "if y.max() > 1e9" in caught.value.at and "test_read_loops.py" in caught.value.at


@pytest.mark.parametrize("kind", ["while", "break"])
def test_an_error_after_a_loop_is_raised(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The trace tries other numbers of turns, and no more of them than it has tries."""
    monkeypatch.setattr(other_ways, "_MOST", 4)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        while kind == "break" or y.abs().max() > 0.1:
            y = y * 0.5
            if kind == "break" and y.abs().max() < 0.1:
                break
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        played(forward)(programs.batch(0))
