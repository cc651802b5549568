"""Refuses a save of ranks that hold the same part of a tensor with other values.

Ranks exchange one hash for each set of tensors that some of them have in common, and only where these differ
one for each tensor. Values that ranks compute separately may differ by rounding: of tensors with other bytes
they compare sums.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.calls.weight_samples import TOLERANCE
from tutti.capture.state.lift import StateTensor
from tutti.checkpoint.unanimous import Unanimous
from tutti.comm.collectives.failure import named_ranks
from tutti.comm.collectives.payload import octets
from tutti.errors import CheckpointError
from tutti.state.residence import Residence, is_here
from tutti.torch_private.dtensors import local_part

_PIECE_NBYTES = 2**22  # of a tensor on a GPU, hashed at a time
_NUM_SUMS = 512  # of a tensor, at most
_FACTOR = -7046029254386353131  # odd, with bits of every position

# By a set of tensors and the place that its holders share: the names, and this rank's part of each.
Common = dict[str, dict[str, Tensor]]


def refuse_unequal(
    state: Sequence[StateTensor], home: Residence, ranks: Unanimous, what: str, fix: str
) -> None:
    """Compare what ranks hold in common; all ranks of a save call together.

    Args:
        what, fix: of the error.

    Raises:
        CheckpointError: on every rank, two of them hold other values of a tensor.
    """
    common = _in_common(state, home)
    hashes = {key: {n: _hash(x) for n, x in parts.items()} for key, parts in common.items()}
    mine = {key: zlib.crc32(json.dumps([*some.items()]).encode()) for key, some in hashes.items()}
    unlike = {key for key, _ in _unlike(_every(mine, ranks, what))}
    if not unlike:
        return
    apart = {
        f"{key} {n}": value for key in unlike & common.keys() for n, value in hashes[key].items()
    }
    names = {name for name, _ in _unlike(_every(apart, ranks, what))}
    sums = {
        f"{key} {n}": _sums(x)
        for key in unlike & common.keys()
        for n, x in common[key].items()
        if f"{key} {n}" in names
    }
    found: dict[str, tuple[int, int]] = {}
    for name, (one, other) in _unlike(_every(sums, ranks, what), near=_near):
        found.setdefault(name.partition(" ")[2], (one, other))
    if found:
        name, pair = next(iter(found.items()))
        more = f' (and {len(found) - 1} more such as "{[*found][1]}")' if len(found) > 1 else ""
        raise CheckpointError(
            f'{what}: "{name}" has other values on {named_ranks(pair[:1])} than on '
            f"{named_ranks(pair[1:])}{more}",
            why="ranks that hold the same part of a weight must hold the same values; a save would keep "
            "those of one rank",
            fix=fix,
        )


def _in_common(state: Sequence[StateTensor], home: Residence) -> Common:
    """This rank's parts that another rank should have, too."""
    found: Common = {}
    mesh = home.layout.mesh
    if mesh.num_ranks == 1 or not dist.is_initialized():
        return {}
    where = mesh.coordinates(dist.get_rank())
    for s in state:
        sharding, x = home.storage.get(s.name), s.tensor
        if sharding is None or not is_here(x):
            continue
        own = {"replica", "pipe", *sharding.axes} & where.keys()
        if all(size == 1 for axis, size in mesh.axes if axis not in own):
            continue
        part = local_part(x) if isinstance(x, DTensor) else x.detach()
        if part.layout == torch.strided and not part.is_meta and not part.is_quantized:
            key = ",".join(f"{axis}={where[axis]}" for axis in sorted(own))
            found.setdefault(key, {})[s.name] = part
    return found


def _every(mine: Mapping[str, Any], ranks: Unanimous, what: str) -> list[Any]:
    """The number of each rank, and its entries."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [json.loads(x) for x in ranks.each(what, lambda: json.dumps([rank, mine]))]


def _unlike(
    every: Sequence[Any], near: Callable[[Any, Any], bool] = eq
) -> Iterator[tuple[str, tuple[int, int]]]:
    """The entries with several values, in order, each with two ranks that differ."""
    first: dict[str, tuple[int, Any]] = {}
    said: set[str] = set()
    for rank, entries in every:
        for key, value in entries.items():
            one, known = first.setdefault(key, (rank, value))
            if key not in said and not near(known, value):
                said.add(key)
                yield key, (one, rank)


def _hash(x: Tensor) -> int:
    """Of all bytes."""
    return zlib.crc32(octets(x)) if x.is_cpu else hash_on_device(x)


def hash_on_device(x: Tensor) -> int:
    """A hash of all bytes of a tensor, which stay on its device."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    weights = torch.arange(1, _PIECE_NBYTES // 8 + 1, device=x.device) * _FACTOR | 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in flat.split(_PIECE_NBYTES):
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        total = total * 31 + (words * weights[: len(words)]).sum()
    return int(total)


def _sums(x: Tensor) -> list[float]:
    """The number of elements in a sum, the largest element, and sums with alternating signs."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    width = max(-(-flat.numel() // _NUM_SUMS), 1)
    signs = (torch.arange(width, device=x.device) * _FACTOR >> 40 & 1).double() * 2 - 1
    largest, found = 0.0, []
    for piece in flat.split(width):
        values = piece.double().nan_to_num()
        largest = max(largest, float(values.abs().max())) if len(values) else largest
        found.append(float((values * signs[: len(values)]).sum()))
    return [float(width), largest, *found]


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether sums differ by no more than the rounding of their elements, which adds up as noise does."""
    if len(one) != len(other):
        return False
    most = TOLERANCE * max(one[1], other[1]) * math.sqrt(one[0])
    return all(abs(a - b) <= most for a, b in zip(one[2:], other[2:], strict=True))
