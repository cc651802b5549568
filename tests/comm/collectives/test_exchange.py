"""Texts between ranks: short ones in one message, and those of any length."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks
from tutti.comm.collectives import exchange
from tutti.comm.collectives.group import Group

SHORT = exchange._SHORT
TEXTS = ["", "x", "ä" * (SHORT // 2), "x" + "ä" * (SHORT // 2), "word " * 400, "\0 "]


def both(turn: int) -> tuple[list[str], int]:
    """Each rank gives another text; what this one gets, and how many messages that took."""
    sent: list[int] = []
    one = exchange.exchange_bytes

    def counted(data: bytes, group: Group, name: str) -> list[bytes]:
        sent.append(len(data))
        return one(data, group, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "exchange_bytes", counted)
        own = TEXTS[(turn + dist.get_rank()) % len(TEXTS)]
        return exchange.exchange_texts(own, Group.world()), len(sent)


def test_texts_of_any_lengths(ranks: Ranks) -> None:
    for turn in range(len(TEXTS)):
        given = [TEXTS[turn], TEXTS[(turn + 1) % len(TEXTS)]]
        messages = 1 + any(len(text.encode()) > SHORT for text in given)
        assert ranks.run(both, turn, n=2) == [(given, messages)] * 2


DTYPES = (torch.int16, torch.bool, torch.complex64, torch.float64, torch.uint8, torch.bfloat16)


def first_of(dtype: torch.dtype) -> list[list[float]]:
    found = []
    for shape in ((), (3,), (0, 2)):
        x = torch.full(shape, 1 + dist.get_rank()).to(dtype)
        exchange.broadcast_first(x)
        found.append([complex(one).real for one in x.reshape(-1).tolist()])
    return found


def test_the_first_rank_gives_tensors_of_all_dtypes(ranks: Ranks) -> None:
    """Gloo broadcasts no integers of 16 bits."""
    for dtype in DTYPES:
        assert ranks.run(first_of, dtype, n=2) == [[[1.0], [1.0] * 3, []]] * 2, dtype
