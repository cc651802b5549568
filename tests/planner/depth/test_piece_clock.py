"""Pieces on a clock: closed forms at both ends, and bounds in between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tutti.planner.depth.piece_clock import PieceWork, played
from tutti.planner.estimates.graph_clock import OVERLAP_SLOWDOWN


def test_without_collectives_the_work_adds_up() -> None:
    found = played([PieceWork(2.0), PieceWork(3.0, exchange=0.5)], lags=True, one_link=False)
    assert (found.seconds, found.kernels, found.waits, found.hidden) == (5.5, 5.0, 0.0, 0.0)


@pytest.mark.parametrize("lags", [True, False])
def test_slow_kernels_hide_all_but_the_ends(lags: bool) -> None:
    """The first gather and the last sum have nothing beside them."""
    work = [PieceWork(10.0, gather=1.0, total=1.0)] * 4
    found = played(work, lags=lags, one_link=False)
    assert found.waits == pytest.approx(2.0)
    assert found.hidden == pytest.approx(6.0)
    assert found.kernels == pytest.approx(40.0 + 6.0 * (1 - 1 / OVERLAP_SLOWDOWN))


@pytest.mark.parametrize("lags", [True, False])
def test_a_slow_link_works_without_a_break(lags: bool) -> None:
    """Gathers take the link from the start on; sums as soon as the first piece is done."""
    gathers = played([PieceWork(1.0, gather=10.0)] * 4, lags=lags, one_link=False)
    assert gathers.seconds == pytest.approx(41.0)
    sums = played([PieceWork(1.0, total=10.0)] * 4, lags=lags, one_link=False)
    assert sums.seconds == pytest.approx(41.0)


def test_a_sum_that_may_not_lag_waits_for_the_one_before_the_last() -> None:
    """A long sum delays kernels of later pieces only if gradients may not pile up."""
    work = [PieceWork(1.0, total=10.0), PieceWork(1.0), PieceWork(1.0, total=1.0), PieceWork(20.0)]
    late, soon = (played(work, lags=x, one_link=False) for x in (True, False))
    assert soon.seconds > late.seconds
    assert late.waits == 0.0


def test_a_sum_waits_for_the_rest_of_its_bucket() -> None:
    """Two pieces fill a bucket: the link begins after the second, the last one ends the row."""
    work = [PieceWork(1.0, total=3.0, num_sums=0.5)] * 4
    found = played(work, lags=True, one_link=False)
    assert found.seconds == pytest.approx(2.0 + 12.0)
    alone = played([PieceWork(1.0, total=3.0, num_sums=0.5)], lags=True, one_link=False)
    assert alone.seconds == pytest.approx(4.0)


def test_a_bucket_of_several_pieces_is_gathered_before_the_first() -> None:
    """The third piece's long gather begins beside the first, since the second has its weights already."""
    numbers = ((1.0, 0.5), (1.0, 0.5), (6.0, 1.0))
    shared = [PieceWork(4.0, gather=x, num_gathers=n) for x, n in numbers]
    alone = [replace(one, num_gathers=1.0) for one in shared]
    ahead, later = (played(x, lags=True, one_link=False) for x in (shared, alone))
    assert ahead.waits == pytest.approx(2.0)
    assert later.waits > 2.4


def test_a_piece_of_several_buckets_waits_for_the_first_alone() -> None:
    found = played([PieceWork(4.0, gather=4.0, num_gathers=4.0)], lags=True, one_link=False)
    assert found.waits == pytest.approx(1.0)


def test_other_collectives_on_the_same_link_wait_for_it() -> None:
    work = [PieceWork(1.0, total=10.0), PieceWork(1.0, exchange=1.0)]
    two, one = (played(work, lags=True, one_link=x) for x in (False, True))
    assert two.seconds == pytest.approx(11.0)  # until the sum ends
    assert one.seconds == pytest.approx(12.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_less_than_device_and_link_and_no_more_than_both(seed: int) -> None:
    draw = random.Random(seed)
    work = [PieceWork(*(draw.choice([0.0, 0.5, 1.0, 4.0]) for _ in range(4))) for _ in range(9)]
    device = sum(p.kernels + p.exchange for p in work)
    link = sum(p.gather + p.total for p in work)
    for lags in (True, False):
        for one_link in (True, False):
            found = played(work, lags=lags, one_link=one_link)
            assert max(device, link) <= found.seconds + 1e-9
            assert found.seconds <= device + link + 1e-9
            exchange = sum(p.exchange for p in work)
            assert found.seconds == pytest.approx(found.kernels + exchange + found.waits)
            assert found.hidden + found.waits >= link - exchange * (not one_link) - 1e-9
