"""The sharding of a tensor over a mesh.

A dim is a product of *segments*, major to minor, each split over some axes. Most dims have one segment.
More appear when a view merges dims whose minor part is split:

    [4, 8@seq]  --view-->  [4*8@seq]         dim 0 of size 32: each rank holds 4 runs of 8/n rows

so flattening (batch, sequence) before a loss costs no communication. The segments of a dim are
canonical: an unsplit segment joins the one to its left, since splitting the front of a contiguous run
splits the whole run.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.argument_types import check_type
from tutti.errors import ShardingError
from tutti.layout.mesh import Mesh

Axes = tuple[str, ...]

# For errors.
_ENTRIES = 'an axis name, "a+b" for several, or "-" for a dim that stays whole'


class Segment(NamedTuple):
    """A run of a dim: its global size and the axes that split it, major to minor."""

    size: int
    axes: Axes = ()

    def __str__(self) -> str:
        return f"{self.size}@{'+'.join(self.axes)}" if self.axes else str(self.size)


Dim = tuple[Segment, ...]


def canonical(segments: Iterable[Segment], mesh: Mesh) -> Dim:
    """Join segments where the joined split means the same."""
    joined: list[Segment] = []
    for seg in segments:
        if joined and (not seg.axes or mesh.size(joined[-1].axes) == joined[-1].size):
            seg = Segment(joined[-1].size * seg.size, joined[-1].axes + seg.axes)
            joined.pop()
        joined.append(seg)
    return tuple(joined)


def restricted(dim: Dim, axes: Collection[str], mesh: Mesh) -> Dim:
    """A dim without its splits over other axes."""
    return canonical((Segment(s.size, tuple(a for a in s.axes if a in axes)) for s in dim), mesh)


def split_dim(dim: Dim, sizes: Iterable[int], mesh: Mesh) -> tuple[Dim, ...] | None:
    """Cut a dim into consecutive factors of `sizes`; None where a split would straddle a cut."""
    return _split_dim(dim, tuple(sizes), mesh)


@lru_cache(maxsize=65536)
def _split_dim(dim: Dim, sizes: tuple[int, ...], mesh: Mesh) -> tuple[Dim, ...] | None:
    parts: list[list[Segment]] = [[]]
    rest = list(reversed(dim))
    for position, size in enumerate(sizes):
        room = size
        while room > 1:
            if not rest:
                return None
            seg = rest.pop()
            if room % seg.size == 0:
                parts[-1].append(seg)
                room //= seg.size
                continue
            if seg.size % room:
                return None
            head, tail = _cut_segment(seg, room, mesh)
            if head is None or tail is None:
                return None
            parts[-1].append(head)
            rest.append(tail)
            room = 1
        if position < len(sizes) - 1:
            parts.append([])
    if any(seg.size > 1 for seg in rest):
        return None
    return tuple(canonical(p, mesh) or (Segment(1),) for p in parts)


@lru_cache(maxsize=65536)
def united(one: Dim, other: Dim, mesh: Mesh) -> Dim | None:
    """The dim split by the axes of both: each rank has what it has under each; None if there is none."""
    if one == other or not any(seg.axes for seg in other):
        return one
    if not any(seg.axes for seg in one):
        return other
    ends = sorted({*_ends(one), *_ends(other)})
    if 0 in ends or any(end % start for start, end in pairwise(ends)):
        return None
    sizes = [end // start for start, end in pairwise([1, *ends])]
    cuts = [split_dim(dim, sizes, mesh) for dim in (one, other)]
    if cuts[0] is None or cuts[1] is None:
        return None
    segments = []
    for (first,), (second,) in zip(*cuts, strict=True):  # no cut falls into a segment
        short, long = sorted((first.axes, second.axes), key=len)
        if long[: len(short)] != short:
            return None
        segments.append(Segment(first.size, long))
    axes = [a for seg in segments for a in seg.axes]
    return canonical(segments, mesh) if len(axes) == len(set(axes)) else None


def _ends(dim: Dim) -> Iterator[int]:
    """The products of the sizes of its first segments, from the major side."""
    return accumulate((seg.size for seg in dim), operator.mul)


def _cut_segment(seg: Segment, head: int, mesh: Mesh) -> tuple[Segment | None, Segment | None]:
    """`seg` as a major part of size `head` and the rest, its axes filling the major part first."""
    taken, room = 0, head
    for axis in seg.axes:
        if room % mesh.size(axis):
            break
        room //= mesh.size(axis)
        taken += 1
    if taken < len(seg.axes) and room > 1:
        return None, None
    tail = Segment(seg.size // head, seg.axes[taken:])
    if tail.size % mesh.size(tail.axes):
        return None, None
    return Segment(head, seg.axes[:taken]), tail


@dataclass(frozen=True)
class Sharding:
    """For each dim the segments and the axes that split them, and the axes with a pending reduction.

    `partial` maps an axis to its pending reduction: "sum", "max", "min" or "prod".
    Prints as `8@data, 512@tensor {partial seq}` and parses back.
    """

    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...] = ()

    # A sharding is a key of many caches, so it keeps its hash.
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharding):
            return NotImplemented
        return self is other or (self.dims == other.dims and self.partial == other.partial)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __reduce__(self) -> tuple[type[Sharding], tuple[object, ...]]:
        return Sharding, (self.dims, self.partial)  # hashes of text differ between processes

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Sharding:
        """The sharding under which every rank holds the whole tensor."""
        return cls(tuple((Segment(int(s)),) for s in shape))

    @classmethod
    def parse(cls, text: str, shape: Sequence[int] | None = None) -> Sharding:
        """Read `"data, tensor, -"` (with `shape`) or the sized form that `str` prints.

        Raises `ShardingError` for anything else, an axis named twice, or entries of another shape.
        """
        check_type("the sharding", text, str, wanted="a text", fix=_ENTRIES, error=ShardingError)
        match = re.fullmatch(r"\s*([^{}]*?)\s*(?:\{partial ([^{}]*)\})?\s*", text)
        if match is None:
            raise ShardingError(f'cannot read the sharding "{text}"', fix='write "data, tensor, -"')
        entries = [e.strip() for e in match[1].split(",")] if match[1] else []
        if shape is not None and len(entries) != len(shape):
            raise ShardingError(
                f'"{text}" has {len(entries)} entries for a tensor of {len(shape)} dims',
                why=f"the shape is {list(shape)}; a sharding has one entry per dim",
                fix=_ENTRIES,
            )
        dims = tuple(
            _parse_dim(e, None if shape is None else int(shape[i])) for i, e in enumerate(entries)
        )
        pairs = [p.partition(":") for p in (match[2] or "").split()]
        _refuse_twice(text, dims, [name for name, _, _ in pairs])
        return cls(dims, tuple((name, op or "sum") for name, _, op in pairs))

    def __str__(self) -> str:
        body = ", ".join("*".join(map(str, dim)) for dim in self.dims)
        pending = " ".join(a if op == "sum" else f"{a}:{op}" for a, op in self.partial)
        return f"{body} {{partial {pending}}}".strip() if pending else body

    def only(self, axes: Collection[str], mesh: Mesh) -> Sharding:
        """This sharding restricted to `axes`, without pending reductions."""
        return Sharding(tuple(restricted(dim, axes, mesh) for dim in self.dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(s.size for s in dim) for dim in self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every axis that splits a dim."""
        return frozenset(a for dim in self.dims for seg in dim for a in seg.axes)

    @cached_property
    def partial_axes(self) -> frozenset[str]:
        """Every axis with a pending reduction."""
        return frozenset(axis for axis, _ in self.partial)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the final, whole tensor."""
        return not self.axes and not self.partial

    def with_partial(self, partial: Iterable[tuple[str, str]]) -> Sharding:
        """The same splits with other pending reductions."""
        partial = tuple(sorted(partial))
        if partial == self.partial:
            return self
        return Sharding(self.dims, partial)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape that each rank holds."""
        return _local_shape(self, mesh)

    def divides(self, mesh: Mesh) -> bool:
        """Whether the number of its ranks divides the size of every segment."""
        return _divides(self, mesh)

    def view_of(self, whole: Tensor, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
        """A view of the part of `whole` at `coordinates`, with one dim for each segment."""
        segments = [seg for dim in self.dims for seg in dim]
        part = whole.view([seg.size for seg in segments])
        for dim, seg in enumerate(segments):
            if seg.axes:
                size = seg.size // mesh.size(seg.axes)
                part = part.narrow(dim, mesh.index(seg.axes, coordinates) * size, size)
        return part

    def index(self, dim: int, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
        """The global indices along `dim` that the rank at `coordinates` holds, int64, 1-D."""
        index = torch.zeros(1, dtype=torch.int64)
        for seg in self.dims[dim]:
            part = seg.size // mesh.size(seg.axes)
            start = mesh.index(seg.axes, coordinates) * part
            here = torch.arange(start, start + part)
            index = (index[:, None] * seg.size + here[None, :]).flatten()
        return index

    def cut(self, x: Tensor, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
        """The part of the whole `x` that the rank at `coordinates` holds (partial axes aside).

        Raises `ShardingError` for a tensor of another shape, or a mesh over which it does not divide.
        """
        fits = self.axes <= mesh.sizes.keys() and self.divides(mesh)
        if not fits or tuple(x.shape) != self.shape:
            raise self._cannot_cut(x, mesh)
        if not self.axes:
            return x
        return self.view_of(x, mesh, coordinates).reshape(self.local_shape(mesh))

    def _cannot_cut(self, x: Tensor, mesh: Mesh) -> ShardingError:
        what = (
            f'the sharding "{self}" cannot cut a tensor of shape {list(x.shape)} over mesh "{mesh}"'
        )
        if lacks := sorted(self.axes - mesh.sizes.keys()):
            why, fix = (
                f"the mesh has no axis {lacks[0]}",
                f"a mesh with {lacks[0]}=2, or another axis",
            )
        elif tuple(x.shape) != self.shape:
            why = f"it is one of a tensor of shape {list(self.shape)}"
            fix = f"Sharding.parse(text, {list(x.shape)})"
        else:
            why = "all parts of a dim have one size"
            fix = "sizes that the ranks of their axes divide"
        return ShardingError(what, why=why, fix=fix)


@lru_cache(maxsize=65536)
def _local_shape(sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    return tuple(
        math.prod([seg.size // mesh.size(seg.axes) for seg in dim]) for dim in sharding.dims
    )


@lru_cache(maxsize=65536)
def _divides(sharding: Sharding, mesh: Mesh) -> bool:
    return all(seg.size % mesh.size(seg.axes) == 0 for dim in sharding.dims for seg in dim)


def _refuse_twice(text: str, dims: tuple[Dim, ...], pending: list[str]) -> None:
    """Each coordinate along an axis belongs to one part of a dim, or to one summand."""
    axes = [axis for dim in dims for seg in dim for axis in seg.axes] + pending
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice is not None:
        raise ShardingError(
            f'the sharding "{text}" names the axis {twice} twice',
            why="an axis splits one dim of a tensor, once",
            fix=f'{twice} for one dim, and "-" for the others',
        )


def _parse_dim(entry: str, size: int | None) -> Dim:
    if size is not None and re.fullmatch(r"-|[A-Za-z_]\w*(\+\w+)*", entry):
        return (Segment(size, () if entry == "-" else tuple(entry.split("+"))),)
    segments = []
    for part in entry.split("*"):
        match = re.fullmatch(r"(\d+)(?:@(\w+(?:\+\w+)*))?", part.strip())
        if match is None:
            raise ShardingError(
                f'cannot read "{entry}" in a sharding',
                fix=_ENTRIES,
            )
        segments.append(Segment(int(match[1]), tuple(match[2].split("+")) if match[2] else ()))
    if size is not None and math.prod(s.size for s in segments) != size:
        raise ShardingError(
            f'"{entry}" in a sharding is for another size than {size}, that of its dim',
            fix=_ENTRIES,
        )
    return tuple(segments)


def assemble(parts: Sequence[Tensor], sharding: Sharding, mesh: Mesh) -> Tensor:
    """Join every rank's part, in rank order, into the whole tensor, and apply pending reductions.

    The inverse of `Sharding.cut`. Virtual ranks and tests compare its result with one device.
    """
    whole = parts[0].new_zeros(sharding.shape)
    pieces: dict[tuple[tuple[int, ...], ...], tuple[int, list[Tensor]]] = {}
    for rank, part in enumerate(parts):
        here = mesh.coordinates(rank)
        held = sharding.axes | sharding.partial_axes
        if any(c for a, c in here.items() if a not in held):
            continue  # a replica of the rank at 0
        key = tuple(tuple(mesh.index(seg.axes, here) for seg in dim) for dim in sharding.dims)
        pieces.setdefault(key, (rank, []))[1].append(part)
    for rank, values in pieces.values():
        value = _reduce(values, sharding.partial) if len(values) > 1 else values[0]
        here = sharding.view_of(whole, mesh, mesh.coordinates(rank))
        here.copy_(value.reshape(here.shape))
    return whole


def _reduce(values: list[Tensor], partial: tuple[tuple[str, str], ...]) -> Tensor:
    ops = {op for _, op in partial} or {"sum"}
    assert len(ops) == 1, "mixed pending reductions"
    stacked = torch.stack(values)
    match ops.pop():
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case op:
            assert op == "prod", op
            return stacked.prod(0)
