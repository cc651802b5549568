"""Values of ranks in turns: each reads what the others have published, however far apart they are."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from thread_exchange import exchange_of
from tutti.comm.host import publications as module
from tutti.comm.host.life import Life
from tutti.comm.host.publications import Publications
from tutti.comm.host.segment import SharedMemoryError, new_file
from tutti.comm.host.signals import PeerDiffers, PeerLate


def play(n: int, function: Callable[[Publications], Any], seconds: float = 30.0) -> list[Any]:
    """The result or the error of each of n threads, as ranks 10, 11, ..."""
    found: list[Any] = [None] * n
    groups: list[Publications] = []  # they live until all have ended
    exchange = exchange_of(n)

    def run(k: int) -> None:
        made = Publications(
            list(range(10, 10 + n)), k, [os.getpid()] * n, exchange[k], seconds, n + 64
        )
        groups.append(made)
        try:
            found[k] = function(made)
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    with mock.patch.object(Life, "ended", lambda _: False):  # one poll serves one thread
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def value(loop: int, turn: int) -> torch.Tensor:
    """Bytes whose number varies, and rises in the course."""
    size = random.Random(loop * 100 + turn).randrange(1, 3000 * (turn + 1))
    return torch.full((size,), (7 * loop + turn) % 251, dtype=torch.uint8)


def loops(group: Publications) -> int:
    """Loops of several lengths, taken slowly by one rank and then another; the number of values."""
    chance, count = random.Random(group.position), 0
    for loop, num_turns in enumerate((17, 1, 6, 23)):
        group.begin(loop)
        for turn in range(num_turns):
            own = turn + group.position
            if turn % group.size == 0 and own < num_turns:
                x = value(loop, own)
                text = f"{loop} {own}".encode()
                assert not group.publish(text, [(0, x), (-(-len(x) // 64) * 64, x)])
            if chance.random() < 0.1:
                time.sleep(0.003)
            if group.owner(turn) != group.position:
                found = group.take(turn)
                assert found is not None and found.text.decode() == f"{loop} {turn}"
                x = value(loop, turn)
                assert torch.equal(found.memory[: len(x)], x)
                assert torch.equal(found.memory[-len(x) :], x)
            count += 1
    return count


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_rank_takes_every_value(n: int) -> None:
    assert play(n, loops) == [47] * n


def test_ranks_that_left_at_different_turns_begin_together() -> None:
    def left(group: Publications) -> str:
        group.begin(1)
        for k in range(1 + 3 * group.position):  # rank 11 is three rounds ahead
            group.publish(f"old {k}".encode())
        group.begin(2)
        group.publish(f"new of {group.position}".encode())
        found = group.take(1 - group.position)
        assert found is not None
        return found.text.decode()

    assert play(2, left) == ["new of 1", "new of 0"]


def test_other_notes_are_told_apart() -> None:
    errors = play(2, lambda group: group.begin(group.position))
    assert all(isinstance(x, PeerDiffers) for x in errors)


def test_a_rank_that_does_not_publish_is_late() -> None:
    def wait(group: Publications) -> None:
        group.begin(0)
        if group.position == 0:
            group.take(1)

    error, _ = play(2, wait, 0.5)
    assert isinstance(error, PeerLate) and error.ranks == (11,)


def test_a_value_without_memory_is_published_as_none() -> None:
    def short(group: Publications) -> Any:
        group.begin(0)
        problem = group.publish(b"x" * 10, [(0, torch.zeros(10**5, dtype=torch.uint8))])
        return problem, group.take(1 - group.position)

    full = OSError(errno.ENOSPC, "no space")
    with mock.patch.object(module, "new_file", side_effect=full):
        for problem, found in play(2, short):
            assert "has no room for" in problem and found is None


def test_memory_that_its_rank_gave_back_is_not_mixed_up_with_another_file() -> None:
    closed = threading.Event()
    others: list[Any] = []

    def leave(group: Publications) -> None:
        group.begin(0)
        if group.position == 0:
            group.publish(b"a value")
            fd = group._boxes[0].fd
            group._boxes[0].close()
            others.append(new_file(2**20))
            assert others[0] == fd, "the number is free, and taken again"
            closed.set()
            return
        closed.wait()
        with pytest.raises(SharedMemoryError, match="Stale"):
            group.take(0)

    try:
        assert play(2, leave) == [None, None]
    finally:
        os.close(others[0])


def test_memory_grows_with_the_largest_value_alone() -> None:
    def growing(group: Publications) -> int:
        group.begin(0)
        for turn in range(0, 40, 2):
            group.publish(b"v", [(0, torch.zeros(20000 * (1 + turn % 9), dtype=torch.uint8))])
            if group.position == 0:
                group.take(turn + 1)
            else:
                group.take(turn)
        return sum(box.nbytes for box in group._boxes)

    for nbytes in play(2, growing):
        assert nbytes <= 2 * 1.25 * (20000 * 9 + 64) + 2 * 4096
