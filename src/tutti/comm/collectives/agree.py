"""All ranks run the same collectives in the same order, or none starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_bytes, exchange_texts
from tutti.comm.collectives.group import Group
from tutti.errors import CommError


def check_order(order: Sequence[str], *, group: Group | None = None) -> None:
    """Compare the order of collectives across ranks; a rank that differs would hang them all.

    Each rank sends the sha256 of its order, 32 bytes; only if these differ the texts follow.

    Args:
        order: one entry for each collective of the program, such as "all_reduce(%12, data)".
        group: the ranks that run the same program; all of them by default.

    Raises:
        CommError: on every rank, with the first position that differs and each rank's entry there.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    group = group or Group.world()
    text = json.dumps(list(order))
    digests = exchange_bytes(hashlib.sha256(text.encode()).digest(), group)
    if len(set(digests)) > 1:
        orders = [json.loads(text) for text in exchange_texts(text, group)]
        raise _mismatch(dict(zip(group.ranks, orders, strict=True)))


def _mismatch(orders: dict[int, list[str]]) -> CommError:
    length = max(map(len, orders.values()))
    padded = {
        rank: order + ["(no more collectives)"] * (length - len(order))
        for rank, order in orders.items()
    }
    position = next(i for i in range(length) if len({order[i] for order in padded.values()}) > 1)
    entries: dict[str, list[int]] = {}
    for rank, order in padded.items():
        entries.setdefault(order[position], []).append(rank)
    lines = [f"{_ranks(ranks)}: {entry}" for entry, ranks in entries.items()]
    return CommError(
        f"ranks would run different collectives, first at position {position} of {length}",
        why="\n       ".join(lines),
        fix="give every rank the same model, batch shapes and layout",
    )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
