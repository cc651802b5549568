"""Collectives over ranks of several hosts: shared memory inside each, torch.distributed between.

    host A   ranks 0 1        inside   [0 1] [2 3]     shared memory
    host B   ranks 2 3        across   [0 2] [1 3]     each carries its share of the bytes

An all-reduce is a reduce-scatter inside, an all-reduce of one part per rank across, an all-gather inside.
So the traffic between hosts is that of one rank per host, split over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm.collectives.transport import Distributed
from tutti.comm.host.shared_memory import SharedGroup

# Both levels sum these in float32 and round once.
_HALF = (torch.bfloat16, torch.float16)


class Hierarchical:
    """A `Transport` on two levels.

    Args:
        ranks: the whole group in its order.
        hosts: the ranks of each host, in the group's order; equally many each.
        shared: the ranks of this host.
        across: the ranks at this rank's position on every host, in the order of `hosts`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        hosts: Sequence[Sequence[int]],
        shared: SharedGroup,
        across: Distributed,
    ) -> None:
        self._shared, self._across = shared, across
        self._width, self._num_hosts = len(hosts[0]), len(hosts)
        # The position in the group of every host's ranks: the order of parts stacked by (host, rank).
        self._positions = [list(ranks).index(rank) for host in hosts for rank in host]

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """`x` reduced over the group, a new tensor."""
        if x.dtype in _HALF:
            return self.all_reduce(x.float(), op).to(x.dtype)
        flat = x.contiguous().view(-1)
        size = flat.numel()
        padding = -size % self._width
        if padding:
            flat = torch.cat([flat, flat.new_zeros(padding)])
        mine = self._shared.reduce_scatter(flat.view(self._width, -1), op)
        mine = self._across.all_reduce(mine, op)
        return self._shared.all_gather(mine).view(-1)[:size].view(x.shape).contiguous()

    def all_gather(self, x: Tensor) -> Tensor:
        """`[*shape]` of each rank to `[n, *shape]`."""
        across = self._across.all_gather(x)  # [hosts, *shape] of the ranks at my position
        every = self._shared.all_gather(across).transpose(0, 1)  # [hosts, width, *shape]
        result = x.new_empty(len(self._positions), *x.shape)
        result[self._positions] = every.reshape(len(self._positions), *x.shape)
        return result

    def reduce_scatter(self, parts: Tensor, op: str) -> Tensor:
        """`[n, *shape]`, one part for each rank, to the reduced part `[*shape]` of this rank."""
        if parts.dtype in _HALF:
            return self.reduce_scatter(parts.float(), op).to(parts.dtype)
        ordered = parts[self._positions].view(self._num_hosts, self._width, *parts.shape[1:])
        mine = self._shared.reduce_scatter(ordered.transpose(0, 1).contiguous(), op)
        return self._across.reduce_scatter(mine, op)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """`[n, *shape]`, one part for each rank, to `[n, *shape]`, one part from each rank."""
        shape = parts.shape[1:]
        ordered = parts[self._positions].view(self._num_hosts, self._width, *shape)
        # First to the rank of this host at the receiver's position, then to the receiver's host.
        near = self._shared.all_to_all(ordered.transpose(0, 1).contiguous())  # [from, host, ...]
        far = self._across.all_to_all(near.transpose(0, 1).contiguous())  # [from host, from, ...]
        result = torch.empty_like(parts)
        result[self._positions] = far.reshape(len(self._positions), *shape)
        return result
