"""How messages travel between the replicas of a run: among the ranks with the same other coordinates.

replica=2 data=2        replica 0   rank 0   rank 1
                                       |        |         each pair exchanges what both hold
                        replica 1   rank 2   rank 3
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm import together
from tutti.comm.channel import DEFAULT_CAPACITY, Channel
from tutti.comm.channels import make_channels
from tutti.comm.failure import naming
from tutti.comm.group import Group
from tutti.comm.groups import Axes, Groups
from tutti.comm.transport import Distributed, Transport
from tutti.layout import Mesh
from tutti.replicas import traffic
from tutti.replicas.parts import replica_here
from tutti.replicas.strategy import MEAN, PUSH, Round, Strategy
from tutti.replicas.traffic import Message

NEAR, FAR = "replica", "groups of replicas"
Read = Callable[[Message], Message]


class Between:
    """The exchanges of one rank; all ranks of the run make theirs together.

    Args:
        strategy: says which exchanges there will be.
        mesh: of the run; its axis `replica` is the outermost.
        device: where the weights lie.
    """

    def __init__(self, strategy: Strategy, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.num_replicas = mesh.size("replica")
        self._coded = strategy.coding in traffic.CODINGS
        # Rounds of a few periods show every kind there is: hops repeat after the logarithm of replicas.
        begin, count = strategy.warm_up + 1, strategy.period * self.num_replicas.bit_length()
        known = [
            r for k in range(begin, begin + count) for r in strategy.rounds(k, self.num_replicas)
        ]
        size = max((r.group for r in known), default=0) or self.num_replicas
        axes = {FAR: self.num_replicas // size, NEAR: size}
        axes |= {a: n for a, n in mesh.axes if a != "replica"}
        self._all: Axes = (FAR, NEAR)
        self.groups = Groups(axes, [self._all, (NEAR,)])
        self._far: dict[Axes, Transport] = {}
        for used in (self._all, (NEAR,)):
            self._own_transport(used)
        self._place = mesh.coordinates(self.groups.rank)
        hops = sorted({r.hop for r in known if r.kind == PUSH})
        self._channels = (
            make_channels(self._edges(hops), self.groups, device=device) if hops else {}
        )

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return replica_here(self.mesh)

    @property
    def group(self) -> Group:
        """The ranks of all replicas that hold what this one holds."""
        return self.groups[self._all]

    def exchange(self, due: Round, sent: Message, read: Read) -> Message:
        """What comes of a round in which this rank sends `sent`; waits for the others of the round.

        Raises:
            CommError: a replica of the round is gone, or does not come in time.
        """
        if due.kind == MEAN:
            return self._mean(due, sent, read)
        return self._push(due.hop, sent)

    def _mean(self, due: Round, sent: Message, read: Read) -> Message:
        axes: Axes = (NEAR,) if due.group else self._all
        group, via = self.groups[axes], self._transport(axes)
        names, xs = list(sent), list(sent.values())
        with naming("mean", ("replica",), sum(x.nbytes for x in xs), group):
            if not self._coded:
                totals = together.all_reduce([traffic.wide(x) for x in xs], "sum", via)
                return traffic.shares(dict(zip(names, totals, strict=True)), group.size, sent)
            # What comes in few bits cannot be summed on the way.
            rows = together.all_gather(xs, via)
        of_each = [
            {n: row[i] for n, row in zip(names, rows, strict=True)} for i in range(group.size)
        ]
        return traffic.mean([read(message) for message in of_each])

    def _push(self, hop: int, sent: Message) -> Message:
        """Send and receive chunk by chunk: all may send first, as a channel holds two of them."""
        to, source = self._channels[self._edge(hop, 0)], self._channels[self._edge(hop, -hop)]
        return {n: _swap(x, to, source) for n, x in sent.items()}

    def _edge(self, hop: int, back: int) -> tuple[int, int]:
        """From this replica's rank (or that of the one `back` places away) by a hop."""
        begin = (self.replica + back) % self.num_replicas
        end = (begin + hop) % self.num_replicas
        a, b = (self.mesh.rank({**self._place, "replica": r}) for r in (begin, end))
        return a, b

    def _edges(self, hops: list[int]) -> list[tuple[int, int]]:
        edges = []
        for hop in hops:
            for ranks in self.mesh.groups(["replica"]):
                edges += [(r, ranks[(i + hop) % len(ranks)]) for i, r in enumerate(ranks)]
        return edges

    def _transport(self, axes: Axes) -> Transport:
        near = self.groups.shared(axes) if self.device.type == "cpu" else None
        return near or self._far.get(axes) or self.groups.transport(axes, self.device)

    def _own_transport(self, axes: Axes) -> None:
        """A communicator of its own for what may run beside the program's collectives over all ranks."""
        group = self.groups[axes]
        if group.size == dist.get_world_size():
            handle = dist.new_group(list(group.ranks), timeout=self.groups.timeout)
            assert isinstance(handle, dist.ProcessGroup)
            self._far[axes] = Distributed(Group.of(handle, group.ranks, self.groups.rank))


def _swap(x: Tensor, to: Channel, source: Channel) -> Tensor:
    flat = x.contiguous().view(-1)
    size = max(1, DEFAULT_CAPACITY // 2 // flat.element_size())
    parts = []
    for i in range(max(1, math.ceil(flat.numel() / size))):
        chunk = flat[i * size : (i + 1) * size]
        to.send(chunk)
        parts.append(source.recv(chunk.shape, chunk.dtype))
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(x.shape)
