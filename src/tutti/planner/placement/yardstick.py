"""The seconds by which placements are compared: on a given cluster, or by bytes and arithmetic alone.

    without a cluster    kernel       the longer of arithmetic / peak and bytes / memory
                         collective   bytes sent by a rank / link

Without a cluster the rates are those of an H100 host; latencies, launches and tiles do not count, so that a
small model is placed like a large one of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.costs.collective_seconds import RankGroup, collective_seconds, sent_nbytes
from tutti.costs.graph_seconds import CollectiveCall
from tutti.costs.kernel_seconds import kernel_seconds
from tutti.costs.kernels import DeviceKernel
from tutti.costs.rank_groups import RankGroups
from tutti.hardware.cluster import Cluster
from tutti.layout import Layout

_DEFAULT = "h100"


@dataclass(frozen=True)
class Yardstick:
    """Seconds of kernels and collectives of one rank.

    Args:
        cluster: the devices and links.
        layout: gives the ranks of each axis.
        is_plain: without latencies, launches and tiles.
    """

    cluster: Cluster
    layout: Layout
    is_plain: bool

    @staticmethod
    def of(layout: Layout, cluster: Cluster | None) -> Yardstick:
        """For a cluster, or without one."""
        return Yardstick(cluster or Cluster.parse(_DEFAULT), layout, cluster is None)

    def kernel(self, kernel: DeviceKernel) -> float:
        """Seconds of a kernel."""
        device = self.cluster.device
        if not self.is_plain:
            return kernel_seconds(kernel, device, eager=False)
        rate = device.peak_of(kernel.dtype) * device.matmul_efficiency.value
        return max(kernel.flops / rate, self.memory(kernel.nbytes))

    def memory(self, nbytes: float) -> float:
        """Seconds to read or write bytes in the memory of a device."""
        device = self.cluster.device
        return nbytes / (device.bandwidth.value * device.memory_efficiency.value)

    def collective(self, call: CollectiveCall, share: float = 1.0) -> float:
        """Seconds of a collective on `share` of its bytes."""
        group = self.group(call.axes)
        if not self.is_plain:
            return collective_seconds(call.kind, share * call.nbytes, group, self.cluster.topology)
        topology = self.cluster.topology
        link = topology.inside if group.num_hosts == 1 else topology.between
        return share * self.sent(call) / (link.bandwidth.value * link.efficiency.value)

    def sent(self, call: CollectiveCall) -> float:
        """Bytes that a rank sends in a collective."""
        return sum(sent_nbytes(call.kind, call.nbytes, self.group(call.axes)))

    def group(self, axes: tuple[str, ...]) -> RankGroup:
        """The ranks over which a collective of these axes goes."""
        return RankGroups(self.layout.mesh, self.cluster.topology.host_size)[axes]
