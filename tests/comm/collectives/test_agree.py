"""Ranks whose collectives differ refuse to start, all of them, with both orders shown."""

from __future__ import annotations

import pytest

from ranks import Ranks
from tutti.comm.collectives.agree import check_order
from tutti.errors import CommError

ORDER = [f"all_reduce(%{i}, data)" for i in range(30)]


def agree_on_rank(orders: list[list[str]]) -> str:
    import torch.distributed as dist

    try:
        check_order(orders[dist.get_rank()])
    except CommError as error:
        return str(error)
    return ""


def test_equal_orders_pass(ranks: Ranks) -> None:
    assert ranks.run(agree_on_rank, [ORDER] * 4) == [""] * 4
    assert ranks.run(agree_on_rank, [[]] * 4) == [""] * 4


def test_a_mismatch_shows_position_and_entries_on_every_rank(ranks: Ranks) -> None:
    other = [*ORDER[:17], "all_gather(%17, tensor)\nwith a newline, and é", *ORDER[18:]]
    messages = ranks.run(agree_on_rank, [ORDER, other, ORDER, other])
    assert len(set(messages)) == 1
    assert "position 17 of 30" in messages[0]
    assert "ranks 0, 2: all_reduce(%17, data)" in messages[0]
    assert "ranks 1, 3: all_gather(%17, tensor)" in messages[0]


@pytest.mark.parametrize("shorter", [0, 5, 29])
def test_an_order_that_ends_early(ranks: Ranks, shorter: int) -> None:
    messages = ranks.run(agree_on_rank, [ORDER, ORDER, ORDER, ORDER[:shorter]])
    assert f"position {shorter} of 30" in messages[3]
    assert "rank 3: (no more collectives)" in messages[0]


def test_one_process_agrees_with_itself() -> None:
    check_order(ORDER)
