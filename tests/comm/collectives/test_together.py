"""Several tensors in one collective equal one collective each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranks import Ranks
from tutti.comm.collectives import together
from tutti.comm.collectives.groups import Groups
from ways import WAYS, by

AXES = ("data",)


class Counted:
    """A transport that counts its moves."""

    def __init__(self, via: object) -> None:
        self._via, self.num = via, 0

    def __getattr__(self, name: str) -> object:
        self.num += 1
        return getattr(self._via, name)


def several(way: str) -> list[int]:
    with by(way):
        groups = Groups({"data": 4}, [AXES])
    via = groups.transport(AXES, torch.device("cpu"))
    dtypes = (torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.float32)
    shapes = ((4, 3), (4,), (4, 0), (4, 2, 2), (4, 1))
    xs = [torch.randint(0, 9, s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    xs.append(torch.arange(12.0).view(3, 4).t())  # not contiguous
    moves = []
    for name, args in (("all_reduce", ("sum",)), ("all_gather", ()), ("reduce_scatter", ("sum",))):
        counted = Counted(via)
        got = getattr(together, name)(xs, *args, counted)
        moves.append(counted.num)
        want: list[Tensor] = [getattr(via, name)(x, *args) for x in xs]
        for y, z in zip(got, want, strict=True):
            assert y.dtype == z.dtype and torch.equal(y, z), name
    assert together.all_reduce([], "sum", via) == []
    return moves


@pytest.mark.parametrize("way", WAYS)
def test_as_one_by_one_with_a_move_for_each_dtype(ranks: Ranks, way: str) -> None:
    assert ranks.run(several, way) == [[3, 3, 3]] * 4
