"""Which weights replicas exchange, and which of them take part in a round.

A weight joins before the first step that trains it: then it is the same on all replicas. If a round makes it
the same again (`Strategy.settles`), it takes part in a round if a step has trained it since its last. So a
weight frozen between two rounds takes part in one more, and in none after that:

    step              1    2    3    4    5    6    7    8    9
    trained           a    a    ab   ab   b    b    ab   ab   ab
    rounds               a         ab         b         ab

All replicas make the same steps, so their rosters are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby

import torch
from torch import Tensor

from tutti.replicas.strategy import Round, Strategy

# The global shapes of weights, by name.
Shapes = Mapping[str, tuple[int, ...]]


class Roster:
    """The weights in the order of joining, with the steps of joining, last training and last round.

    A weight that joins later does not move those before it to other fragments.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._joined: dict[str, int] = {}
        self._trained: dict[str, int] = {}
        self._met: dict[str, int] = {}
        self._seen: Shapes | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._joined

    def lacks(self, shapes: Shapes) -> Shapes:
        """Those of these weights that have not joined, or had another shape then."""
        if shapes is self._seen:
            return {}
        self._seen = shapes
        return {n: shape for n, shape in shapes.items() if self._shapes.get(n) != shape}

    def join(self, shapes: Shapes, step: int) -> None:
        """Add weights before `step`, the first that trains them; those of another shape join anew."""
        for table in (self._shapes, self._joined, self._trained, self._met):
            for name in shapes:
                table.pop(name, None)
        self._shapes |= shapes
        self._joined |= dict.fromkeys(shapes, step)
        self._met |= dict.fromkeys(shapes, step - 1)
        self._trained |= dict.fromkeys(shapes, step - 1)

    def train(self, names: Iterable[str], step: int) -> None:
        """Note that `step` trains these weights."""
        self._trained |= dict.fromkeys(names, step)

    def part(self, due: Round, strategy: Strategy) -> list[str]:
        """The weights of a round: those of its fragment that take part."""
        names = strategy.fragment(list(self._joined), due)
        if not strategy.settles:
            return names
        return [n for n in names if self._trained[n] > self._met[n]]

    def meet(self, due: Round, names: Iterable[str]) -> None:
        """Note that these weights take part in a round; after one of a group, replicas still differ."""
        if not due.group:
            self._met |= dict.fromkeys(names, due.begins)

    def still(self, due: Round, names: Iterable[str]) -> frozenset[str]:
        """Those of these weights that no step has trained since a round began."""
        return frozenset(n for n in names if self._trained[n] <= due.begins)

    def generations(self) -> list[list[str]]:
        """The weights that joined before the same step, in the order of joining."""
        return [list(names) for _, names in groupby(self._joined, self._joined.__getitem__)]

    def packed(self) -> Tensor:
        """All of it as bytes, for a checkpoint."""
        rows = {
            n: [step, self._trained[n], self._met[n], self._shapes[n]]
            for n, step in self._joined.items()
        }
        return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Roster:
        """The roster of `packed`."""
        found = cls()
        for n, (joined, trained, met, shape) in json.loads(bytes(packed.tolist())).items():
            found._joined[n], found._trained[n], found._met[n] = joined, trained, met
            found._shapes[n] = tuple(shape)
        return found
