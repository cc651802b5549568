"""The calls of a rank: the newest few with their arguments, and how far each step has come."""

from __future__ import annotations

import os

import pytest

from tutti.comm.host.board import NUM_ENTRIES, NUM_STEPS, Board
from tutti.comm.host.segment import directory


@pytest.fixture
def board() -> Board:
    if directory() is None:
        pytest.skip("no shared memory here")
    return Board([0], 0, [os.getpid()], lambda text: [text])


def call(step: int, count: int) -> int:
    return step << 32 | count


def test_a_step_has_reached_its_calls_however_long_ago(board: Board) -> None:
    for count in range(1, 10 * NUM_ENTRIES):
        board.write(call(7, count), b"", b"x")
        board.leave()
        assert board.reached(0, call(7, count)) and not board.reached(0, call(7, count + 1))
        assert board.reached(0, call(7, 1)) and not board.reached(0, call(8, 1))
        assert board.has(0, call(7, 1)) == (count <= NUM_ENTRIES)
    board.write(call(8, 1), b"", b"")
    assert board.reached(0, call(7, 5)) and board.reached(0, call(8, 1))


def test_the_oldest_of_many_steps_is_forgotten(board: Board) -> None:
    for step in range(1, NUM_STEPS + 3):
        board.write(call(step, 3), b"", b"")
    known = [step for step in range(1, NUM_STEPS + 3) if board.reached(0, call(step, 1))]
    assert known == [*range(3, NUM_STEPS + 3)]
    board.write(call(1, 4), b"", b"")
    assert board.reached(0, call(1, 4)) and board.reached(0, call(NUM_STEPS, 3))
