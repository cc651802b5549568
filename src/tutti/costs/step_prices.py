"""The prices by which a step is cut into stages: seconds of its nodes, and of a message between stages.

    on processors    rates of a server CPU (`graph/analysis/cost.py`)
    on GPUs          kernels, collectives and messages on hosts of H100s, whatever the GPUs are

All ranks must cut alike, on any device. So nothing is measured here, and the ratios of one GPU stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from torch import fx

from tutti.costs.collective_seconds import collective_seconds, message_seconds
from tutti.costs.draw_seconds import draw_seconds
from tutti.costs.graph_seconds import collective_call
from tutti.costs.kernel_seconds import kernel_seconds
from tutti.costs.kernels import DeviceKernel, kernels_of
from tutti.costs.rank_groups import RankGroups
from tutti.errors import PlanError
from tutti.graph.analysis.cost import Rates, kind_of, rates_of, seconds_of
from tutti.hardware.cluster import Cluster
from tutti.layout import Mesh

_DEFAULT = "h100"


@dataclass(frozen=True)
class StepPrices:
    """Prices of the nodes of a step on one kind of device.

    Args:
        rates: of the device, in place of a cluster.
        cluster: the devices and links, if they are GPUs.
        mesh: gives the ranks of each collective.
    """

    rates: Rates
    cluster: Cluster | None
    mesh: Mesh

    @staticmethod
    def of(values: Any, mesh: Mesh) -> StepPrices:
        """For the device of the first tensor in `values`, nested in any way."""
        cluster = _cluster() if kind_of(values) == "cuda" else None
        return StepPrices(rates_of(values), cluster, mesh)

    @property
    def device(self) -> str:
        """Whose seconds they are, in words."""
        return "a thread of a server CPU" if self.cluster is None else self.cluster.device.name

    def seconds(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """The seconds of each node that takes some; a node without an entry takes none."""
        if self.cluster is None:
            return {n: seconds for n in graph.nodes if (seconds := seconds_of(n)) > 0}
        device, topology = self.cluster.device, self.cluster.topology
        groups = self._groups
        found = {k.nodes[-1]: self._kernel(k) for k in kernels_of(graph, fused=False)}
        found |= {node: seconds for node, (seconds, _) in draw_seconds(graph, device).items()}
        for node in graph.nodes:
            call = collective_call(node)
            if call is not None and groups[call.axes].size > 1:
                moving = collective_seconds(call.kind, call.nbytes, groups[call.axes], topology)
                found[node] = device.host_seconds.value + moving
        return found

    def _kernel(self, kernel: DeviceKernel) -> float:
        assert self.cluster is not None
        try:
            return kernel_seconds(kernel, self.cluster.device)
        except PlanError:  # a dtype without a peak, which some GPU may have
            return seconds_of(kernel.node)

    def message(self, nbytes: float) -> float:
        """Seconds of a message to the next pipeline rank."""
        if self.cluster is None:
            return nbytes / self.rates.link
        crosses = self._groups.crosses_hosts("pipe")
        return message_seconds(nbytes, self.cluster.topology, across_hosts=crosses)

    @cached_property
    def _groups(self) -> RankGroups:
        assert self.cluster is not None
        return RankGroups(self.mesh, self.cluster.topology.host_size)


@cache
def _cluster() -> Cluster:
    return Cluster.parse(_DEFAULT)
