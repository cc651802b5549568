"""A text of the first rank: the others wait longer than a collective may, and learn of its failure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from ranks import Ranks
from tutti.comm.collectives.made_by_first import made_by_first
from tutti.errors import CommError

NAME = "the choice of a layout"


@pytest.fixture(autouse=True)
def _new_ranks(ranks: Ranks) -> Iterator[None]:
    """The timeouts of these ranks end with each test."""
    yield
    ranks.renew()


def slow(_check: Callable[[], None]) -> str:
    time.sleep(3.0)
    return "data=2"


def failing(_check: Callable[[], None]) -> str:
    raise KeyError("micro")


def watchful(check: Callable[[], None]) -> str:
    for _ in range(1000):
        check()
        time.sleep(0.01)
    return ""


def within_a_second(make: Callable[[Callable[[], None]], str], *, absent: bool = False) -> str:
    os.environ["TUTTI_TIMEOUT"] = "1"
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if absent and dist.get_rank() == 1:
        return ""
    try:
        return made_by_first(make, NAME)
    except (CommError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def absent_second(make: Callable[[Callable[[], None]], str]) -> str:
    return within_a_second(make, absent=True)


def test_it_may_take_longer_than_a_collective(ranks: Ranks) -> None:
    assert ranks.run(within_a_second, slow, n=2) == ["data=2"] * 2


def test_a_failure_of_the_first_rank_is_one_of_all(ranks: Ranks) -> None:
    began = time.monotonic()
    first, second = ranks.run(within_a_second, failing, n=2)
    assert first == "KeyError: 'micro'"
    assert second.startswith(f"CommError: rank 0 failed in {NAME}")
    assert "KeyError: 'micro'" in second
    assert time.monotonic() - began < 20


def test_the_first_rank_learns_that_another_does_not_come(ranks: Ranks) -> None:
    first, _ = ranks.run(absent_second, watchful, n=2)
    assert first.startswith(f"CommError: rank 1 did not join rank 0 in {NAME} within 1 s")
