"""The time of a collective and of a message: latency and bandwidth, by algorithm, size and link.

    ring   all-reduce        start + 2(n-1) latency + 2(n-1)/n bytes / rate + bytes / copy rate
           gather, scatter   start +  (n-1) latency +  (n-1)/n bytes / rate + bytes / copy rate
    tree   all-reduce        start + 2 log2(n) latency + 2 bytes / rate + bytes / copy rate
    all-to-all               start +  (n-1) latency +  (n-1)/n bytes / rate + bytes / copy rate

`bytes` are those of the whole value on one rank. Within a host `rate` is that of the link of each device. A
group of several hosts first reduces within each host, then each of its l ranks of a host sums its part of
1/l with its peers on the other hosts, then the host gathers: the devices of a host share its adapters. An
all-to-all sends each rank its own part: those for ranks of other hosts all cross the adapters.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
NCCL's double binary trees (`src/graph/tuning.cc`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.errors import PlanError
from tutti.hardware.link import Link
from tutti.hardware.topology import Topology

# How often the bytes cross a link in a ring of many ranks, by kind.
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective: `size` of them, `per_host` of them on each host."""

    size: int
    per_host: int

    @staticmethod
    def strided(size: int, stride: int, host_size: int) -> RankGroup:
        """`size` ranks at a distance of `stride`, on hosts of `host_size` ranks."""
        return RankGroup(size, max(1, min(size, host_size // stride)))

    @property
    def num_hosts(self) -> int:
        """Hosts with a rank of it."""
        return -(-self.size // self.per_host)


def ring_seconds(kind: str, nbytes: float, size: int, link: Link, rate: float) -> float:
    """A ring of `size` ranks; `rate` in bytes per second of each."""
    passes = _PASSES[kind]
    steps = passes * (size - 1)
    return steps * link.latency.value + steps / size * nbytes / rate


def tree_seconds(nbytes: float, size: int, link: Link, rate: float) -> float:
    """An all-reduce by two binary trees, up and down."""
    return 2 * math.log2(size) * link.latency.value + 2 * nbytes / rate


def collective_seconds(kind: str, nbytes: float, group: RankGroup, topology: Topology) -> float:
    """Seconds of a collective; 0 for a group of one.

    Args:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all.
        nbytes: bytes of the whole value: the operand of a reduction, the result of a gather.
        group: its ranks.
        topology: links and hosts.

    Raises:
        PlanError: another kind.
    """
    if kind not in _PASSES:
        raise PlanError(
            f'no cost of a collective "{kind}"', why=f"the kinds are {', '.join(_PASSES)}"
        )
    if group.size == 1:
        return 0.0
    if group.num_hosts == 1:
        return _start(topology.inside, nbytes) + _within(kind, nbytes, group.size, topology.inside)
    return _start(topology.between, nbytes) + _between(kind, nbytes, group, topology)


def sent_nbytes(kind: str, nbytes: float, group: RankGroup) -> tuple[float, float]:
    """Bytes that a rank sends to others of its host, and to other hosts; see `collective_seconds`."""
    near, hosts = group.per_host, group.num_hosts
    within, across = _levels(kind, nbytes, group)
    passes = _PASSES[kind]
    return passes * (near - 1) / near * within, passes * (hosts - 1) / hosts * across


def message_seconds(nbytes: float, topology: Topology, *, across_hosts: bool) -> float:
    """Seconds of a message from one pipeline rank to the next, while all devices of a host send."""
    link = topology.between if across_hosts else topology.inside
    rate = link.bandwidth.value * link.message_efficiency.value
    return link.latency.value + nbytes / (rate * (_share(topology) if across_hosts else 1.0))


def _start(link: Link, nbytes: float) -> float:
    copying = nbytes / link.copy_bandwidth.value if link.copy_bandwidth else 0.0
    return link.start.value + copying


def _within(kind: str, nbytes: float, size: int, link: Link) -> float:
    rate = link.bandwidth.value * link.efficiency.value
    ring = ring_seconds(kind, nbytes, size, link, rate)
    return min(ring, tree_seconds(nbytes, size, link, rate)) if kind == "all_reduce" else ring


def _between(kind: str, nbytes: float, group: RankGroup, topology: Topology) -> float:
    inside, between = topology.inside, topology.between
    rate = between.bandwidth.value * between.efficiency.value * _share(topology)
    whole, part = _levels(kind, nbytes, group)
    hosts = ring_seconds(kind, part, group.num_hosts, between, rate)
    if kind == "all_reduce":
        hosts = min(hosts, tree_seconds(part, group.num_hosts, between, rate))
    if group.per_host == 1:
        return hosts
    return hosts + ring_seconds(
        kind, whole, group.per_host, inside, inside.bandwidth.value * inside.efficiency.value
    )


def _levels(kind: str, nbytes: float, group: RankGroup) -> tuple[float, float]:
    """The bytes of a rank that go round its host, and round the hosts."""
    if kind == "all_to_all":
        return nbytes / group.num_hosts, nbytes
    return nbytes, nbytes / group.per_host


def _share(topology: Topology) -> float:
    """The part of an adapter that one device of a full host has to itself."""
    return topology.adapters.value / topology.devices_per_host.value
