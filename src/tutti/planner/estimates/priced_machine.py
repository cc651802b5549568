"""The hardware of an estimate: a cluster, and the time of the kernels of a graph on one of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from tutti.costs.collective_seconds import message_seconds
from tutti.costs.draw_seconds import draw_seconds
from tutti.costs.kernel_seconds import limited_seconds
from tutti.costs.kernels import kernels_of
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Topology


class PricedKernels(NamedTuple):
    """The kernels of a graph, each at the node that ends it.

    seconds: of each. limits: what these seconds are for, if that is known (`costs/kernel_seconds.py`).
    """

    seconds: Mapping[fx.Node, float]
    limits: Mapping[fx.Node, str] = MappingProxyType({})


PriceKernels = Callable[[fx.Graph], PricedKernels]


@dataclass(frozen=True)
class MeasuredKernels:
    """Prices kernels by their `seconds` on a clock, which do not tell arithmetic from memory."""

    seconds: Callable[[fx.Graph], Mapping[fx.Node, float]]

    def __call__(self, graph: fx.Graph) -> PricedKernels:
        return PricedKernels(self.seconds(graph))


@dataclass(frozen=True)
class PricedMachine:
    """`cluster`, and the way to price its kernels.

    kernels: prices the kernels of a final graph.
    launch_seconds: of the host, for each collective. call_seconds: of a call of the step, beside its ops.
    ranks_per_processor: ranks that compute in turns on one; more than 1 on a machine with too few of them.
    message_start: seconds before the first byte of a message, beside the link's own.
    value_start: of ranks that share memory, seconds to begin the copy of a value into it, or out of it.
    shares_memory: ranks of one host exchange through shared memory, so the passes write that program.
    onednn: matmuls run by oneDNN's kernels.
    settled: prices kernels once more, when all graphs that are compared have been timed.
    pace: how many times as long as estimated a step takes at the processor's speed, after all estimates.
    """

    cluster: Cluster
    kernels: PriceKernels
    launch_seconds: float
    call_seconds: float = 0.0
    ranks_per_processor: float = 1.0
    message_start: float = 0.0
    value_start: float = 0.0
    shares_memory: bool = False
    onednn: bool = False
    settled: PriceKernels | None = None
    pace: Callable[[], float] | None = None

    @property
    def topology(self) -> Topology:
        """Of the cluster."""
        return self.cluster.topology

    def message(self, nbytes: float, *, across_hosts: bool) -> float:
        """Seconds of a message to the next pipeline rank, beside its `message_work`."""
        nbytes = 0.0 if self.shares_memory and not across_hosts else nbytes
        seconds = message_seconds(nbytes, self.topology, across_hosts=across_hosts)
        return self.message_start + seconds

    def message_work(self, nbytes: Sequence[float], *, across_hosts: bool) -> float:
        """Seconds in which the sender of values of these sizes copies them into shared memory, and its
        receiver out of it; 0 for ranks that share none."""
        if not self.shares_memory or across_hosts:
            return 0.0
        moving = message_seconds(sum(nbytes), self.topology, across_hosts=False)
        return len(nbytes) * self.value_start + moving

    def slower(self, factor: float) -> PricedMachine:
        """The same with kernels that take `factor` times as long."""

        def kernels(graph: fx.Graph) -> PricedKernels:
            seconds, limits = self.kernels(graph)
            return PricedKernels({node: factor * x for node, x in seconds.items()}, limits)

        return replace(self, kernels=kernels)

    @staticmethod
    def of(cluster: Cluster, *, eager: bool = True, draws: bool = True) -> PricedMachine:
        """A cluster by its data alone.

        Args:
            cluster: with the data.
            eager: the host launches each op when its turn comes.
            draws: count the kernels of random numbers; false for frameworks that fuse them.
        """
        device = cluster.device

        def kernels(graph: fx.Graph) -> PricedKernels:
            found = {
                kernel.nodes[-1]: limited_seconds(kernel, device, eager=eager)
                for kernel in kernels_of(graph, fused=not eager)
            }
            found |= draw_seconds(graph, device, eager=eager) if draws else {}
            limits = {node: limit for node, (_, limit) in found.items()}
            return PricedKernels({node: seconds for node, (seconds, _) in found.items()}, limits)

        launch = device.host_seconds.value if eager else 0.0
        call = device.call_seconds.value if device.call_seconds else 0.0
        return PricedMachine(cluster, kernels, launch, call)
