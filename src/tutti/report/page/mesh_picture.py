"""The mesh of ranks, and the part of each kind of tensor that each rank stores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from tutti.layout.mesh import Mesh
from tutti.quantities import format_nbytes
from tutti.report.page.drawing import picture, rect, text

MOST_RANKS, MOST_GROUPS, MOST_MESH_RANKS = 16, 16, 64
_CELL, _BOX, _ROW, _LEFT, _TOP = 58.0, 34.0, 46.0, 330.0, 74.0


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind that are stored alike.

    Args:
        kind: parameter, buffer or slot.
        axes: for each dim the axes that split it.
        pipe: the pipeline ranks that keep them; None for all.
        names: of the tensors.
        nbytes: on one rank that keeps them.
    """

    kind: str
    axes: tuple[tuple[str, ...], ...]
    pipe: tuple[int, ...] | None
    names: tuple[str, ...]
    nbytes: int

    def kept_at(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank there keeps a part."""
        return self.pipe is None or coordinates.get("pipe", 0) in self.pipe

    @property
    def words(self) -> str:
        """How they are split."""
        split = [f"dim {i} over {'+'.join(a)}" for i, a in enumerate(self.axes) if a]
        return ", ".join(split) or "whole"


def groups_of(tensors: Sequence[Mapping[str, Any]]) -> list[TensorGroup]:
    """The tensors by kind, split and pipeline ranks; those with the most bytes first."""

    def key(t: Mapping[str, Any]) -> tuple[Any, ...]:
        axes = [tuple(a) for a in t["axes"]]
        while axes and not axes[-1]:
            axes.pop()  # tensors of fewer dims that are split alike belong together
        return t["kind"], tuple(axes), tuple(t["pipe"]) if t["pipe"] is not None else ()

    found = []
    for (kind, axes, pipe), some in groupby(sorted(tensors, key=key), key):
        own = list(some)
        names, nbytes = tuple(str(t["name"]) for t in own), sum(t["nbytes"] for t in own)
        found.append(TensorGroup(kind, axes, pipe or None, names, nbytes))
    return sorted(found, key=lambda g: -g.nbytes)


def nbytes_at(groups: Sequence[TensorGroup], coordinates: Mapping[str, int]) -> int:
    """The bytes of state of the rank there."""
    return sum(g.nbytes for g in groups if g.kept_at(coordinates))


def draw_mesh(mesh: Mesh) -> Markup | None:
    """The ranks as a grid, the innermost axis from left to right; None for one axis or very many ranks."""
    if len(mesh.axes) < 2 or mesh.num_ranks > MOST_MESH_RANKS:
        return None
    across, width = mesh.axes[-1]
    height = mesh.num_ranks // width
    outer = [name for name, _ in mesh.axes[:-1]]
    shapes = []
    left = 20 + 7.0 * max(len(_at(mesh.coordinates(r * width), outer)) for r in range(height))
    for column in range(width):
        shapes.append(text(left + 64 * column + 28, 16, f"{across} {column}", "middle", "muted"))
    for row in range(height):
        y = 24 + 34.0 * row
        shapes.append(
            text(left - 8, y + 19, _at(mesh.coordinates(row * width), outer), "end", "muted")
        )
        for column in range(width):
            rank = row * width + column
            shapes.append(rect(left + 64 * column, y, 56, 28, "s1", f"rank {rank}"))
            shapes.append(text(left + 64 * column + 28, y + 19, f"rank {rank}", "middle", "on"))
    told = f"{mesh.num_ranks} ranks: {mesh}; the last axis varies fastest."
    return picture(left + 64 * width, 30 + 34 * height, "The mesh of ranks", told, shapes)


def _at(coordinates: Mapping[str, int], axes: Sequence[str]) -> str:
    return ", ".join(f"{a} {coordinates[a]}" for a in axes)


def draw_places(mesh: Mesh, groups: Sequence[TensorGroup]) -> Markup:
    """A row for each group, a column for each rank: the filled part of a square is stored there."""
    shown, ranks = groups[:MOST_GROUPS], range(min(mesh.num_ranks, MOST_RANKS))
    every = [mesh.coordinates(r) for r in ranks]
    shapes = [*_heads(mesh, every)]
    for i, group in enumerate(shown):
        y = _TOP + _ROW * i
        shapes += _label(group, y)
        for rank, at in enumerate(every):
            shapes += _square(mesh, group, at, _LEFT + _CELL * rank, y)
    bottom = _TOP + _ROW * len(shown)
    shapes.append(text(0, bottom + 14, "state in all"))
    for rank, at in enumerate(every):
        nbytes = format_nbytes(nbytes_at(groups, at))
        shapes.append(text(_LEFT + _CELL * rank + _BOX / 2, bottom + 14, nbytes, "middle", "small"))
    told = "; ".join(f"{len(g.names)} {g.kind}s: {g.words}" for g in shown)
    width = _LEFT + _CELL * len(every) + 10
    return picture(
        width, bottom + 24, "The part of each tensor that each rank stores", told, shapes
    )


def _heads(mesh: Mesh, every: Sequence[Mapping[str, int]]) -> Iterator[str]:
    for rank, at in enumerate(every):
        x = _LEFT + _CELL * rank + _BOX / 2
        yield text(x, 14, f"rank {rank}", "middle")
        for k, (axis, _) in enumerate(mesh.axes[-4:]):
            yield text(x, 28 + 12 * k, f"{axis} {at[axis]}", "middle", "muted small")


def _label(group: TensorGroup, y: float) -> Iterator[str]:
    count, first = len(group.names), group.names[0]
    kind = group.kind if count == 1 else f"{group.kind}s"
    yield text(0, y + 14, f"{count} {kind}: {group.words}"[:46])
    more = f" and {count - 1} more" if count > 1 else ""
    name = first if len(first) <= 28 else f"{first[:27]}…"
    yield text(0, y + 29, f"{name}{more}, {format_nbytes(group.nbytes)}", cls="muted small")


def _square(
    mesh: Mesh, group: TensorGroup, at: Mapping[str, int], x: float, y: float
) -> Iterator[str]:
    if not group.kept_at(at):
        yield rect(x, y, _BOX, _BOX, "nothing", "nothing of it is here")
        return
    yield rect(x, y, _BOX, _BOX, "whole")
    split = [axes for axes in group.axes if axes][:2]
    down = group.axes[0] if group.axes and group.axes[0] else ()
    across = next((axes for axes in split if axes is not down), ())
    top, height = _part(mesh, down, at)
    left, width = _part(mesh, across, at)
    share = math.prod(1 / mesh.size(a) for a in group.axes)
    told = f"{share:.4g} of {group.names[0]}" if share < 1 else f"all of {group.names[0]}"
    box = x + left * _BOX, y + top * _BOX, max(width * _BOX, 1.5), max(height * _BOX, 1.5)
    yield rect(*box, {"parameter": "s1", "slot": "s2"}.get(group.kind, "s3"), told)


def _part(mesh: Mesh, axes: Sequence[str], at: Mapping[str, int]) -> tuple[float, float]:
    """The begin and the length of a rank's part of a dim, as shares."""
    size = mesh.size(axes)
    return mesh.index(axes, dict(at)) / size, 1 / size
