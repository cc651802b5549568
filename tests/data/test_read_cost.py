"""Ranks share reads that take much longer than the way of their bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from tutti.data.read_cost import BATCH_SECONDS, BYTE_SECONDS, TIMES, SampleCost, pays, sample_cost
from tutti.data.shared_reads import Terms, _wanted
from tutti.layout import Layout


@pytest.mark.parametrize("nbytes", [8, 10**6])
def test_it_pays_from_a_multiple_of_the_exchange_on(nbytes: int) -> None:
    rows = 16
    least = TIMES * (BATCH_SECONDS + rows * nbytes * BYTE_SECONDS) / rows
    slow, fast = SampleCost(least * 1.01, nbytes), SampleCost(least * 0.99, nbytes)
    assert pays([slow, slow], rows) and not pays([slow, fast], rows)
    assert not pays([slow, SampleCost(1.0, 2 * nbytes + 10**4)], rows)


def test_the_bytes_of_a_sample_are_those_of_its_row() -> None:
    sample = {"x": torch.zeros(10), "n": 3}
    assert sample_cost(sample, 0.5, stacked=True) == SampleCost(0.5, 48)
    assert sample_cost({1}, 0.5, stacked=False) == SampleCost(0.5, 0)  # a collate_fn may join them
    assert "set" in sample_cost([{1}], 0.5, stacked=True).problem
    assert sample_cost([1] * 100, 0.5, stacked=False).nbytes > 200


DEAR, CHEAP = asdict(SampleCost(5e-3, 100)), asdict(SampleCost(1e-6, 100))


@pytest.mark.parametrize(
    ("share", "workers", "cost", "wanted"),
    [
        (None, True, DEAR, True),
        (None, True, CHEAP, False),
        (None, False, DEAR, False),
        (True, False, CHEAP, True),
        (False, True, DEAR, False),
        (True, True, None, False),
    ],
)
def test_who_shares(share: bool | None, workers: bool, cost: Any, wanted: bool) -> None:
    said = [{"share": share, "workers": workers, "cost": cost}] * 2
    terms = Terms(share, by_rows=True, batch_size=8, odd=False, workers=workers, pin=False)
    assert _wanted(said, terms, Layout.parse("tensor=2")) == wanted
