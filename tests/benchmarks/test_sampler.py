"""Looks at a running thread: Python's own work is told from an op's, and from what is excused."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.contenders.contender import Place
from benchmarks.contenders.tutti_step import Distributed, build
from benchmarks.python_share import sampled_share
from benchmarks.sampler import Sampler
from tests.benchmarks.tiny import GPT

SECONDS = 0.4
SAMPLER = Sampler()
pytestmark = pytest.mark.skipif(
    not SAMPLER.works, reason="looks at a thread need Linux on x86-64 and a C compiler"
)


def in_python(seconds: float = SECONDS) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(100))


def in_an_op() -> None:
    x = torch.randn(512, 512)
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        torch.mm(x, x)


def share_of(looks: tuple[int, int]) -> float:
    num_looks, num_python = looks
    assert num_looks > 100
    return num_python / num_looks


def test_python_is_told_from_ops_and_from_waiting() -> None:
    assert share_of(SAMPLER.run(in_python)) > 0.7
    assert share_of(SAMPLER.run(in_an_op)) < 0.1
    assert share_of(SAMPLER.run(lambda: time.sleep(SECONDS))) < 0.1


def test_what_is_excused_is_not_counted() -> None:
    SAMPLER.flag[0] = 1
    try:
        assert SAMPLER.run(in_python).num_python == 0
    finally:
        SAMPLER.flag[0] = 0


def test_the_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(GPT, Place(0, 1), layout="", num_shares=1)
    assert isinstance(made, Distributed)
    made.step()
    step = made.step
    monkeypatch.setattr(made, "step", lambda: (step(), in_python(0.05))[0])
    assert sampled_share(made, SAMPLER) > 0.3
