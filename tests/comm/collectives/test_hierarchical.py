"""Two levels: every order of ranks over hosts, and no more bytes between hosts than one rank would send."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import Ranks
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.hierarchical import Hierarchical
from tutti.comm.collectives.transport import Distributed
from tutti.comm.host.shared_memory import SharedGroup

# The hosts of four ranks; the group's order is another matter.
HOSTS = ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]])


class Weighed(Distributed):
    """Counts the bytes that this rank gives to the other hosts."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.nbytes = 0

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        self.nbytes += x.nbytes
        return super().all_reduce(x, op)

    def all_gather(self, x: Tensor) -> Tensor:
        self.nbytes += x.nbytes
        return super().all_gather(x)

    def reduce_scatter(self, parts: Tensor, op: str) -> Tensor:
        self.nbytes += parts.nbytes // 2
        return super().reduce_scatter(parts, op)

    def all_to_all(self, parts: Tensor) -> Tensor:
        self.nbytes += parts.nbytes // 2
        return super().all_to_all(parts)


def levels(order: tuple[int, ...], hosts: list[list[int]]) -> tuple[Hierarchical, Weighed]:
    rank = dist.get_rank()
    ordered = [[r for r in order if r in host] for host in hosts]
    across = [list(ranks) for ranks in zip(*ordered, strict=True)]
    found: dict[str, Group] = {}
    for name, every in (("near", ordered), ("far", across)):
        for ranks in every:
            handle = dist.new_group(sorted(ranks))
            if rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                found[name] = Group.of(handle, tuple(ranks), rank)
    near, far = found["near"], Weighed(found["far"])
    shared = SharedGroup(near.ranks, near.position, lambda t: exchange_texts(t, near), 30.0)
    return Hierarchical(order, ordered, shared, far), far


def every_move(order: tuple[int, ...], hosts: list[list[int]], size: int) -> list[int]:
    both, far = levels(order, hosts)
    me = order.index(dist.get_rank())
    numbers = torch.Generator().manual_seed(3)
    every = torch.randn(4, 4, size, generator=numbers, dtype=torch.float64)
    weighed: list[int] = []

    def check(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()
        weighed.append(far.nbytes)
        far.nbytes = 0

    check(both.all_reduce(every[me], "sum"), every.sum(0))
    check(both.all_gather(every[me]), every)
    check(both.reduce_scatter(every[me], "sum"), every.sum(0)[me])
    check(both.all_to_all(every[me]), every[:, me])
    check(both.all_reduce(every[me].view(-1)[:7], "prod"), every.flatten(1)[:, :7].prod(0))
    return weighed


@pytest.mark.parametrize(
    ("hosts", "order"), list(itertools.product(HOSTS, [(0, 1, 2, 3), (2, 0, 3, 1)]))
)
def test_any_order_of_ranks_over_hosts(
    ranks: Ranks, hosts: list[list[int]], order: tuple[int, ...]
) -> None:
    size, nbytes = 6, 4 * 6 * 8  # of a rank's tensor
    for weighed in ranks.run(every_move, order, hosts, size):
        # An all-reduce carries half of the tensor for each of a host's two ranks, a gather all of its
        # own. Of four parts two go to the other host: summed before, half of them from each neighbor.
        assert weighed[:4] == [nbytes // 2, nbytes, nbytes // 4, nbytes // 2]
