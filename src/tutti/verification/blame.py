"""Finds the first difference of a partitioned program from one device: runs both node by node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from tutti.graph.edits.edit import source_of
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh, Sharding, assemble
from tutti.partition.partition import Program
from tutti.verification.comparisons import (
    PARTITION_TOLERANCE,
    ROUNDING,
    inputs_of,
    is_rounded,
    largest,
    largest_difference,
)
from tutti.verification.following import following


@dataclass(frozen=True)
class Difference:
    """The first value of the step that differs: its name, its source line, and both norms."""

    node: str
    op: str
    source: str
    module: str
    error: float
    norm: float
    expected_norm: float

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return (
            f"%{self.node} = {self.op}{where} at {self.source}: norm {self.norm:.6g}, "
            f"on one device {self.expected_norm:.6g}, relative difference {self.error:.1e}"
        )


def first_difference_of(
    program: Program, start: dict[str, Tensor], feed: dict[str, Any], seed: int, steps: int
) -> Difference | None:
    """Run both node by node and return the first value whose parts do not equal the whole.

    The device begins with the ranks' state, and its updates take the ranks' gradients.
    """
    one = {n: promoted_value(x) for n, x in start.items()}
    wide = {n: promoted_value(x) for n, x in feed.items()}
    mesh, captured = program.mesh, program.captured
    everywhere = [mesh.coordinates(r) for r in range(mesh.num_ranks)]
    many = [
        {n: program.storage[n].cut(x, mesh, p).clone() for n, x in one.items()} for p in everywhere
    ]
    dense, dense_owner, dense_back = promoted(captured.graph, captured.owner)
    local, local_owner, local_back = promoted(program.graph, captured.owner)
    holds: dict[fx.Node, tuple[fx.Node, Sharding]] = {}
    for value, node, sharding in program.made:
        holds.setdefault(node, (value, sharding))
    for k in range(steps):
        feeds = [inputs_of(captured, s, wide) for s in many]
        ranks = VirtualRanks(mesh, seed=seed, step=k)
        taker = _Taker(program, local_back)
        ranks.run(local, local_owner, feeds, taker.see)
        values: dict[fx.Node, Any] = {}

        def change(node: fx.Node, own: list[Any], seen=values, taken=taker.taken) -> list[Any]:
            seen[dense_back[node]] = own[0]
            return [taken.get(dense_back[node], own[0])]

        whole = [inputs_of(captured, one, wide)]
        VirtualRanks(Mesh(), seed=seed, step=k).run(dense, dense_owner, whole, change=change)
        finder = _Finder(mesh, values, holds, local_back)
        made = ranks.run(local, local_owner, feeds, finder.see)
        if finder.found is not None:
            return finder.found
        for state, (returned, update) in zip(many, made, strict=True):
            state |= dict(zip(captured.updated, update, strict=True))
            state |= following(captured, wide, returned)[1]
        wide, others = following(captured, wide, made[0][0])
        one |= others
        for name in captured.updated:
            one[name] = assemble([s[name] for s in many], program.storage[name], mesh)
    return None


class _Taker:
    """Keeps the inputs of the ranks' updates, whole, for the device's updates (`aligned`)."""

    def __init__(self, program: Program, back: dict[fx.Node, fx.Node]) -> None:
        self.mesh, self.back = program.mesh, back
        self.marks: dict[fx.Node, list[tuple[fx.Node, Sharding]]] = {}
        self.taken: dict[fx.Node, Tensor] = {}
        known = program.plan.boundaries
        for mark, node, sharding in program.made:
            if mark in known and known[mark].into == "update":
                self.marks.setdefault(node, []).append((mark, sharding))

    def see(self, node: fx.Node, parts: list[Any]) -> None:
        for mark, sharding in self.marks.get(self.back[node], ()):
            self.taken.setdefault(mark, assemble(parts, sharding, self.mesh))


class _Finder:
    def __init__(
        self,
        mesh: Mesh,
        values: dict[fx.Node, Any],
        holds: dict[fx.Node, tuple[fx.Node, Sharding]],
        back: dict[fx.Node, fx.Node],
    ) -> None:
        self.mesh, self.values, self.holds, self.back = mesh, values, holds, back
        self.found: Difference | None = None
        self.largest: dict[str, float] = {}

    def see(self, node: fx.Node, parts: list[Any]) -> None:
        made = self.back[node]
        if self.found is not None or made not in self.holds or not isinstance(parts[0], Tensor):
            return
        value, sharding = self.holds[made]
        expected: Any = self.values.get(value)
        if not isinstance(expected, Tensor) or not is_rounded(expected):
            return
        got = assemble(parts, sharding, self.mesh)
        same = got.shape == expected.shape
        scale = self._scale(value, expected)
        if same and self._alike(parts, sharding, scale):
            error = float(largest_difference(got, expected)) / scale
        else:
            error = float("inf")
        if not error <= PARTITION_TOLERANCE:
            source = source_of(value)
            self.found = Difference(
                node=made.name,
                op=str(getattr(made.target, "__name__", made.target)),
                source=source,
                module=value.meta.get("module", ""),
                error=error,
                norm=float(got.norm()),
                expected_norm=float(expected.norm()),
            )

    def _scale(self, value: fx.Node, expected: Tensor) -> float:
        """The scale of an error; a value far below others of its region may be all rounding."""
        region = value.meta.get("region", "forward")
        size = largest(expected[expected.isfinite()])
        self.largest[region] = max(size, self.largest.get(region, 1e-12))
        return max(size, ROUNDING * self.largest[region])

    def _alike(self, parts: list[Tensor], sharding: Sharding, scale: float) -> bool:
        """Whether ranks of a replicated value hold equal values."""
        if sharding.partial:
            return True
        first: dict[tuple[int, ...], Tensor] = {}
        for rank, part in enumerate(parts):
            here = self.mesh.coordinates(rank)
            key = tuple(here[a] for a in sorted(sharding.axes))
            lead = first.setdefault(key, part)
            if float(largest_difference(part, lead)) > PARTITION_TOLERANCE * scale:
                return False
        return True
