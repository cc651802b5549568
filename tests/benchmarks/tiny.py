"""Small models of each kind, and contenders that are not real, for the tests of the benchmark."""

from __future__ import annotations

import os
import time

import torch

from benchmarks.contenders.contender import Contender, Missing, Place, Way
from benchmarks.models import Case, GPTCase, LlamaCase, ResNetCase

GPT = GPTCase(name="gpt", vocab=32, window=8, width=16, depth=1, head_dim=4, per_rank=2)
PIPE = GPTCase(
    name="gpt pipe", vocab=32, window=8, width=16, depth=3, head_dim=4, per_rank=8, in_micro=8
)
LLAMA = LlamaCase(
    name="llama", vocab=32, window=8, width=16, depth=1, head_dim=4, hidden=24, kv_heads=2,
    per_rank=2,
)  # fmt: skip
RESNET = ResNetCase(
    name="resnet", image=16, classes=4, stem=4, widths=(4, 8), depths=(1, 2), per_rank=4
)
SECONDS = 0.02
HELD_NBYTES = 50_000_000


class Sleeper:
    """Each step of rank r takes (r + 1) * SECONDS and has the loss r; it holds HELD_NBYTES."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0
        self.held = torch.ones(HELD_NBYTES, dtype=torch.uint8)

    def step(self) -> float:
        time.sleep(SECONDS * (self.rank + 1))
        self.count += 1
        return float(self.rank)


class Breaker(Sleeper):
    """Raises at its fifth step, or ends its process there."""

    def __init__(self, rank: int, *, kill: bool) -> None:
        super().__init__(rank)
        self.kill = kill

    def step(self) -> float:
        if self.count == 4 and self.kill and self.rank == 1:
            os._exit(1)
        if self.count == 4 and not self.kill:
            raise ValueError("the fifth step is one too many")
        return super().step()


def sleeper(_case: Case, place: Place) -> Contender:
    return Sleeper(place.rank)


def raiser(_case: Case, place: Place) -> Contender:
    return Breaker(place.rank, kill=False)


def killer(_case: Case, place: Place) -> Contender:
    return Breaker(place.rank, kill=True)


def nothing(_place: Place) -> None:
    """No preparation."""


def missing(_place: Place) -> None:
    raise Missing("unheard-of is not installed")


SLEEPER = Way(name="sleeper", build=sleeper, prepare=nothing)
RAISER = Way(name="raiser", build=raiser, prepare=nothing, num_ranks=1)
KILLER = Way(name="killer", build=killer, prepare=nothing)
ABSENT = Way(name="absent", build=sleeper, prepare=missing, num_ranks=1)
