"""Which habits a random program may have, and how often."""

from __future__ import annotations

import random

from benchmarks.fuzz.make import Make
from benchmarks.fuzz.numbers import Piece, coefficient, counter
from benchmarks.fuzz.things import THINGS
from benchmarks.fuzz.weights import AVERAGES, BUFFERS, SCHEDULES, WEIGHTS

# How often each kind of habit is drawn.
HABITS: dict[Make, int] = {
    counter: 5, coefficient: 6, BUFFERS: 3, AVERAGES: 2, WEIGHTS: 3, SCHEDULES: 2, THINGS: 7,
}  # fmt: skip


def habit(draw: random.Random, k: str) -> Piece:
    """One habit."""
    return draw.choices(list(HABITS), list(HABITS.values()))[0](draw, k)
