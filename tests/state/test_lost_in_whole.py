"""A rank that dies, or does not come, while another gathers the weights or leaves the block is named."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tutti
from rank_pools import Pool, RankFailed
from small_steps import step as train_step


def train(layout: str, where: str) -> None:
    """Rank 1 dies before a gathering, or inside of a block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = tutti.distribute(train_step, model, optimizer, layout)
    step(torch.ones(4, 8))
    if where != "first":
        step.model_state()
    dies = dist.get_rank() == 1
    if dies and where != "inside":
        os._exit(3)
    if where == "state":
        step.model_state()
    with tutti.whole(model):
        if dies:
            os._exit(3)


GATHERING, PARTS, STAGES = "the gathering of weights", "data=2 zero=3", "pipe=2 micro=2"


@pytest.mark.parametrize(
    ("layout", "where", "wait"),
    [
        (PARTS, "before", GATHERING),
        (STAGES, "before", GATHERING),
        (STAGES, "state", GATHERING),
        (PARTS, "inside", "the end of tutti.whole"),
        (STAGES, "first", "the start of a group"),
    ],
)
def test_the_error_names_the_rank_and_the_wait(layout: str, where: str, wait: str) -> None:
    pool = Pool(2)
    try:
        with pytest.raises(RankFailed) as error:
            pool.run(train, (layout, where))
    finally:
        pool.kill()
    said = str(error.value)
    assert f"CommError: rank 1 is gone; it left rank 0 in {wait}" in said, said


def alone(layout: str) -> None:
    """Rank 0 opens a block for which no other rank comes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = tutti.distribute(train_step, model, optimizer, layout)
    step(torch.ones(4, 8))
    if dist.get_rank() == 0:
        with step.whole():
            pass
    else:
        time.sleep(10 * LATE_SECONDS)


LATE_SECONDS = 3.0


@pytest.mark.parametrize(("layout", "wait"), [(PARTS, GATHERING), (STAGES, "the start of a group")])
def test_a_rank_that_opens_a_block_alone_is_told_so(layout: str, wait: str) -> None:
    pool = Pool(2, timeout_seconds=LATE_SECONDS)
    try:
        with pytest.raises(RankFailed) as error:
            pool.run(alone, (layout,))
    finally:
        pool.kill()
    said = str(error.value)
    assert f"CommError: rank 1 did not join rank 0 in {wait}" in said, said
    assert "test_lost_in_whole.py:" in said and "  with step.whole():" in said, said
    assert "call it on every rank: take it out of `if rank == 0:`" in said, said
