"""Blocks cover each variable once, and stay where they are when a server is added."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.server.protocol.keys import VariableBlock, blocks, owner
from tutti.server.protocol.update import ServedVariable

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60)
@given(SHAPES, st.sampled_from(["whole", "divisible", "rows"]), st.integers(4, 99))
def test_blocks_cover_a_variable_once(shape: tuple[int, ...], kind: str, nbytes: int) -> None:
    variable = ServedVariable(
        name="w", shape=shape, divisible=kind == "divisible", rows=kind == "rows"
    )
    seen = torch.zeros(shape)
    for block in blocks([variable], 2, nbytes=nbytes):
        piece = block.of(seen)
        assert tuple(piece.shape) == block.shape and piece.nbytes == block.nbytes
        piece += 1
        row = math.prod(shape[1:]) * 4 if kind == "rows" else 4
        assert kind == "whole" or block.nbytes <= max(nbytes, row)
    assert torch.equal(seen, torch.ones(shape))


def test_a_slot_of_another_shape_goes_with_each_block() -> None:
    (first, *_) = blocks([ServedVariable(name="w", shape=(100,), divisible=True)], 1, nbytes=40)
    step = torch.tensor(3.0)
    assert first.of(step) is step


def test_blocks_are_of_4_mb() -> None:
    found = blocks([ServedVariable(name="w", shape=(64 * 2**20 // 4,), divisible=True)], 3)
    assert [b.nbytes for b in found] == [4 * 2**20] * 16
    assert [b.key for b in found] == list(range(16))


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_one_server_more_takes_its_share_and_moves_nothing_else(num: int) -> None:
    names = [f"w/{k}" for k in range(2000)]
    before, after = ([owner(n, s) for n in names] for s in (num, num + 1))
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {num}
    share = 2000 / (num + 1)
    assert abs(len(moved) - share) < 5 * math.sqrt(share)
    assert min(Counter(after).values()) > share / 2


def test_blocks_are_the_same_in_every_process() -> None:
    """Written down, since a server that starts again with another version must own the same."""

    def where(found: tuple[VariableBlock, ...]) -> list[int]:
        return [b.server for b in found]

    variables = [ServedVariable(name=f"layer.{k}", shape=(4,)) for k in range(12)]
    assert where(blocks(variables, 3)) == [2, 0, 0, 2, 1, 0, 1, 1, 1, 1, 1, 0]
