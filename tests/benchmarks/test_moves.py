"""The players that are measured compute the same."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.moves import AXES, MOVES, PLAYERS, Bench, rounds
from ranks import Ranks


def moved_on_rank() -> dict[str, list[list[float]]]:
    import torch
    import torch.distributed as dist

    bench = Bench()
    x = torch.arange(8.0) * (dist.get_rank() + 1)
    return {
        who: [
            player.all_reduce(player.lay(x.clone(), "all_reduce"), AXES, "sum").tolist(),
            player.all_gather(player.lay(x, "all_gather"), AXES, 0, 1).tolist(),
            player.reduce_scatter(player.lay(x, "reduce_scatter"), AXES, 0, 1, "sum").tolist(),
        ]
        for who, player in bench.players.items()
    }


def rounds_on_rank(name: str, nbytes: int, num_rounds: int) -> dict[str, Any]:
    return rounds(Bench(), name, nbytes, num_rounds)


def test_every_player_moves_the_same(ranks: Ranks) -> None:
    counted = [float(i) for i in range(8)]
    total = [3 * i for i in counted]
    for rank, found in enumerate(ranks.run(moved_on_rank, n=2)):
        assert found.keys() == PLAYERS.keys()
        for who, moved in found.items():
            gathered = counted + [2 * i for i in counted]
            assert moved == [total, gathered, total[4 * rank : 4 * rank + 4]], who


@pytest.mark.parametrize("name", sorted({name for name, _ in MOVES}))
def test_one_number_a_round(ranks: Ranks, name: str) -> None:
    for found in ranks.run(rounds_on_rank, name, 4096, 2, n=2):
        assert found.keys() == PLAYERS.keys()
        assert all(len(x) == 2 and min(x) > 0 for x in found.values())
