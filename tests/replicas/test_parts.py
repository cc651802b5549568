"""What each replica is given."""

from __future__ import annotations

import pytest
import torch

from tutti.errors import ShardingError
from tutti.replicas.replica_rows import of_batch, rows, seed_of


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_rows_of_all_replicas_make_up_the_batch(count: int) -> None:
    batch = [torch.randn(6, 3), torch.randint(9, (6,)), torch.tensor(2.0), torch.randn(3, 6)]
    parts = [rows(batch, r, count) for r in range(count)]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), batch[i])
    for part in parts:  # what has another number of rows is not a sample's
        assert part[2] is batch[2] and part[3] is batch[3]


def test_a_nest_keeps_its_form() -> None:
    x = torch.arange(8)
    found = of_batch(({"x": x, "scale": 0.5}, [x + 1, "text"]), 1, 2)
    assert found[0]["scale"] == 0.5 and found[1][1] == "text"
    assert found[0]["x"].tolist() == [4, 5, 6, 7] and found[1][0].tolist() == [5, 6, 7, 8]


def test_samples_must_divide() -> None:
    with pytest.raises(ShardingError, match=r'over axis "replica" \(size 4\)') as caught:
        rows([torch.tensor(1.0), torch.randn(6)], 0, 4)
    assert "batch tensor 1" in str(caught.value) and "(8)" in str(caught.value)


def test_replica_0_has_the_seed_of_the_run_and_others_their_own() -> None:
    assert seed_of(7, 0) == 7
    assert len({seed_of(seed, r) for seed in (0, 1) for r in range(50)}) == 100
