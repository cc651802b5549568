"""Exchanges texts between ranks, which agree on settings before they start."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.collectives import transport
from tutti.comm.collectives.group import Group


def exchange_bytes(data: bytes, group: Group) -> list[bytes]:
    """The data of every rank, in the group's order; equally long on all ranks, and not empty."""
    x = _to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [bytes(row.tolist()) for row in transport.all_gather(x, group).cpu()]


def exchange_texts(text: str, group: Group) -> list[str]:
    """The text of every rank, in the group's order; lengths may differ."""
    data = text.encode()
    sizes = transport.all_gather(_to_device(torch.tensor(len(data))), group).tolist()
    padded = data.ljust(max(1, *sizes))
    rows = exchange_bytes(padded, group)
    return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]


def _to_device(x: Tensor) -> Tensor:
    backend = dist.get_backend_config()
    return x if "cpu" in backend or "gloo" in backend else x.cuda()
