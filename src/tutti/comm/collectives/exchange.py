"""Exchanges texts between ranks, which agree on settings before they start."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives import transport
from tutti.comm.collectives.failure import naming
from tutti.comm.collectives.group import Group

# Most texts are a few words: with their length they travel in one message.
_SHORT, _LENGTH = 248, 8
_AGREEMENT = "an agreement of the ranks"


def exchange_bytes(data: bytes, group: Group, name: str = _AGREEMENT) -> list[bytes]:
    """The data of every rank, in the group's order; equally long on all ranks, and not empty.

    `name` and errors are those of `exchange_texts`.
    """
    with naming(name, (), 0, group):
        x = _to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in transport.all_gather(x, group).cpu()]


def exchange_texts(text: str, group: Group, name: str = _AGREEMENT) -> list[str]:
    """The text of every rank, in the group's order; lengths may differ.

    Args:
        text: of this rank.
        group: the ranks, which call this together.
        name: what they do together, for errors.

    Raises:
        CommError: a rank has gone, or does not come within `TUTTI_TIMEOUT`.
    """
    data = text.encode()
    head = len(data).to_bytes(_LENGTH, "little") + data[:_SHORT].ljust(_SHORT)
    found = exchange_bytes(head, group, name)
    sizes = [int.from_bytes(one[:_LENGTH], "little") for one in found]
    rows = [one[_LENGTH:] for one in found]
    if max(sizes) > _SHORT:
        rest = exchange_bytes(data[_SHORT:].ljust(max(sizes) - _SHORT), group, name)
        rows = [row + more for row, more in zip(rows, rest, strict=True)]
    return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]


def broadcast_first(x: Tensor) -> None:
    """Replace `x`, contiguous, by that of rank 0; all ranks call this together.

    Raises `CommError` as `exchange_texts`.
    """
    world = Group.world()
    with naming("the broadcast of rank 0's state", (), x.nbytes, world):
        transport.broadcast_(x, 0, world)


def _to_device(x: Tensor) -> Tensor:
    backend = dist.get_backend_config()
    return x if "cpu" in backend or "gloo" in backend else x.cuda()
