"""How a habit becomes a piece of a program: lines by place, under a name of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.fuzz.numbers import Piece

Make = Callable[[random.Random, str], Piece]


def same(name: str, watch: tuple[str, ...] = (), **lines: list[str]) -> Make:
    """A habit without a choice; `K` stands for its own name."""

    def make(draw: random.Random, k: str) -> Piece:
        mine = {at: [line.replace("K", k) for line in found] for at, found in lines.items()}
        return Piece(name, mine, tuple(w.replace("K", k) for w in watch))

    return make


def one_of(*made: Make) -> Make:
    return lambda draw, k: draw.choice(made)(draw, k)
