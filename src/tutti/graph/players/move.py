"""The collectives of one node as a value, without their tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import fx

from tutti.graph.ops import collectives

Axes = tuple[str, ...]
Where = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Collectives of one kind over one group, one for each of several tensors.

    `wheres[i]` says where the collective acts on tensor `i`: `(dim, outer)`; for an all-to-all the pair of
    the split dim, then that of the joined dim; an all-reduce ignores it. `op` is "sum", "max", "min" or
    "prod", and "" without a reduction.
    """

    kind: str
    axes: Axes
    wheres: tuple[Where, ...]
    op: str = ""

    @staticmethod
    def of(node: fx.Node) -> Move:
        """The move of a node of a program: a single collective, or several joined."""
        given: Any = node.args
        target: Any = node.target
        if target in collectives.COLLECTIVES:
            _, axes, *where = given
            op = where.pop() if target in collectives.REDUCTIONS else ""
            return Move(target.__name__, axes, (tuple(where),), op)
        if target is collectives.gather_into:
            _, _, axes, wheres = given
            return Move("all_gather", axes, tuple(map(tuple, wheres)))
        kind, _, axes, wheres, op = given
        return Move(kind, axes, tuple(map(tuple, wheres)), op)

    @staticmethod
    @functools.cache
    def alike(kind: str, axes: Axes, where: Where = (), op: str = "", *, count: int = 1) -> Move:
        """The same collective on each of `count` tensors; made once."""
        return Move(kind, axes, (where,) * count, op)

    def rest(self, i: int) -> tuple[Any, ...]:
        """The arguments behind `axes` of collective `i` as a node of its own."""
        if self.kind in ("all_gather", "all_to_all"):
            return self.wheres[i]
        return (*self.wheres[i], self.op) if self.kind == "reduce_scatter" else (self.op,)
