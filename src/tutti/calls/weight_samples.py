"""Compares a few bytes of some weights between ranks periodically: replicated parts must be equal.

    16 weights, 12 slots     64 bytes of each, at a moving offset; the next ones eight calls later

A model with no more than these is sampled at each call.

The comparison is between ranks with the same part. Values that two ranks compute separately may differ by
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.layout import Mesh, Sharding
from tutti.partition.partition import Program

NBYTES = 64  # of each tensor
NUM_WEIGHTS, NUM_OTHERS = 16, 12  # at a time
EVERY = 8  # calls: a sample takes 0.2 ms of a cold processor, as much as all other comparisons
TOLERANCE = 1e-4  # of the largest sampled element
_PRIME, _STEP = 7919, 8  # from call to call, in places of 8 bytes


class Samples:
    """Samples of the state of one program on this rank.

    Args:
        names: of the state tensors, in the captured order, the same on all ranks.
        kinds: "parameter", "slot" and others, of each.
        storage: the sharding of each.
        mesh: all ranks of the program, the axis `pipe` among them.
        owners: the pipeline ranks that keep each tensor, if there is a pipeline.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str],
        storage: Mapping[str, Sharding],
        mesh: Mesh,
        owners: Mapping[str, Collection[int]],
    ) -> None:
        axes = [tuple(sorted(storage[n].axes)) if n in storage else None for n in names]
        # Tensors of one sharding are adjacent, so that one comparison covers them.
        order = sorted((k for k, a in enumerate(axes) if a is not None), key=lambda k: (axes[k], k))
        self._names, self._axes, self._owners = names, axes, owners
        weights = _cut([k for k in order if kinds[k] == "parameter"], NUM_WEIGHTS)
        others = _cut([k for k in order if kinds[k] != "parameter"], NUM_OTHERS)
        num_blocks = max(len(weights), len(others))
        self._every = EVERY if num_blocks > 1 else 1
        self._round = num_blocks * self._every
        self._blocks = [
            weights[i % len(weights)] + others[i % len(others)]
            for i in range(math.lcm(len(weights), len(others)))
        ]
        self._where = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
        self._views: dict[int, tuple[int, memoryview, int, bytes]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._alike_in: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    @classmethod
    def of_program(cls, program: Program, owners: Mapping[str, Collection[int]]) -> Samples | None:
        """The samples of a partitioned program's state; None on one rank, which has no peer to compare."""
        mesh = program.layout.mesh
        names = [s.name for s in program.captured.state]
        kinds = [s.kind for s in program.captured.state]
        return cls(names, kinds, program.storage, mesh, owners) if mesh.num_ranks > 1 else None

    def of(self, own: Sequence[Tensor], call: int) -> bytes:
        """The samples of this rank's parts that are due at a call; none at most calls."""
        if call % self._every:
            return b""
        found, views = [], self._views
        for k in self._blocks[self._block(call)]:
            x = own[k]
            at, seen, places, rest = views.get(k) or self._view(k, x)
            if at != x.data_ptr():
                at, seen, places, rest = self._view(k, x)
            begin = call * _PRIME % places * _STEP
            found.append(seen[begin : begin + NBYTES])
            if rest:
                found.append(rest)
        return b"".join(found)

    def differing(self, call: int, one: int, mine: bytes, other: int, theirs: bytes) -> str:
        """The name of a tensor of which two ranks have the same part with different values; or ""."""
        if mine == theirs or len(mine) != len(theirs):
            return ""
        block = self._block(call)
        for begin, end in self._runs(block, one, other):
            if mine[begin * NBYTES : end * NBYTES] != theirs[begin * NBYTES : end * NBYTES]:
                for i in range(begin, end):
                    a, b = (x[i * NBYTES : (i + 1) * NBYTES] for x in (mine, theirs))
                    if a != b and not self._near(self._blocks[block][i], a, b):
                        return self._names[self._blocks[block][i]]
        return ""

    def _runs(self, block: int, one: int, other: int) -> list[tuple[int, int]]:
        """The ranges of a block for which two ranks hold the same parts."""
        key = (block, one, other)
        if key not in self._alike_in:
            found: list[tuple[int, int]] = []
            for i, k in enumerate(self._blocks[block]):
                if self._alike(k, one, other):
                    if found and found[-1][1] == i:
                        found[-1] = found[-1][0], i + 1
                    else:
                        found.append((i, i + 1))
            self._alike_in[key] = found
        return self._alike_in[key]

    def since(self, call: int) -> int:
        """The call of the last sample of each of these tensors."""
        return max(call - self._round, 0)

    def _block(self, call: int) -> int:
        return call // self._every % len(self._blocks)

    def _alike(self, k: int, one: int, other: int) -> bool:
        """Whether two ranks hold the same part of tensor k."""
        axes, pipe_rank = (*(self._axes[k] or ()), "pipe"), self._where[one].get("pipe", 0)
        if pipe_rank not in self._owners.get(self._names[k], (pipe_rank,)):
            return False
        return all(self._where[one].get(a) == self._where[other].get(a) for a in axes)

    def _near(self, k: int, a: bytes, b: bytes) -> bool:
        dtype = self._dtypes.get(k)
        if dtype is None or dtype.is_complex:
            return False
        x, y = (torch.frombuffer(bytearray(z), dtype=dtype).double() for z in (a, b))
        if torch.equal(x.isnan(), y.isnan()):
            x, y = x.nan_to_num(), y.nan_to_num()
        scale = max(float(x.abs().max()), float(y.abs().max()))
        return not float((x - y).abs().max()) > TOLERANCE * scale

    def _view(self, k: int, x: Tensor) -> tuple[int, memoryview, int, bytes]:
        """Its address, its bytes, the number of offsets of 64 bytes, and padding for a short one."""
        made = x.data_ptr(), memoryview(b""), 1, bytes(NBYTES)  # no sample
        plain = x.detach()
        dense = x.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense(plain)
        if dense and x.device.type == "cpu" and x.numel():
            raw: Any = plain.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
            seen = memoryview(raw)
            made = (
                x.data_ptr(),
                seen,
                max(len(seen) - NBYTES, 0) // _STEP + 1,
                bytes(max(NBYTES - len(seen), 0)),
            )
            self._dtypes[k] = x.dtype
        self._views[k] = made
        return made


def _cut(order: list[int], size: int) -> list[list[int]]:
    return [order[i : i + size] for i in range(0, len(order), size)] or [[]]


def offset_sample(x: Tensor, call: int, most: int) -> Tensor:
    """At most about `most` elements of `x`, spread over it; others at other calls."""
    left = -(-x.numel() // most)
    for d, size in enumerate(x.shape):
        step = min(size, left)
        if step > 1:
            x = x[(slice(None),) * d + (slice(call * _PRIME % step, None, step),)]
            left = -(-left // step)
    return x
