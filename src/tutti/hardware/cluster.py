"""A cluster as text: `64 x h100`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.accelerator import Device
from tutti.hardware.topology import Topology

_TEXT = re.compile(r"\s*(?:(?P<count>\d+)\s*[x×*]\s+)?(?P<name>\S.*?)\s*$")


@dataclass(frozen=True)
class Cluster:
    """`count` equal devices, host after host."""

    count: int
    device: Device
    topology: Topology

    @staticmethod
    def parse(text: str, topology: str | None = None) -> Cluster:
        """`"64 x h100"`, `"h100"` for one, `"8 x ./mine.toml"`; `topology` a name or a path.

        Raises:
            PlanError: the text is not of this form, or names something unknown.
        """
        match = _TEXT.match(text)
        count = int(match["count"] or 1) if match else 0
        if match is None or count < 1:
            raise PlanError(
                f'cannot read the devices "{text}"', fix='a count and a name, such as "64 x h100"'
            )
        device = catalog.device(match["name"])
        beside = catalog.beside(device.topology, match["name"])
        return Cluster(count, device, catalog.topology(topology or beside))

    @property
    def num_hosts(self) -> int:
        """Hosts, the last perhaps not full."""
        return -(-self.count // self.topology.host_size)
