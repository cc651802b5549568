"""A cluster as text: `64 x h100`, `64xh100` or `64 h100`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.accelerator import Device
from tutti.hardware.topology import Topology

_TEXT = re.compile(r"(?:(?P<count>[-+]?\d+)(?:\s*[x×*]\s*|\s+))?(?P<name>\S.*)")
_MOST = 10**7


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
            PlanError: the text is not of this form, or names something unknown; no devices, or more than 10
                million.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f'cannot read the devices "{text}"', fix='a count and a name, such as "64 x h100"'
            )
        alone = match["count"] is None or catalog.is_device(text.strip())
        count, name = (1, text.strip()) if alone else (int(match["count"]), match["name"])
        if not 1 <= count <= _MOST:
            raise PlanError(
                f'"{text}" is {count} devices, and a cluster has 1 to {_MOST:,}',
                fix=f'such as "64 x {name}"',
            )
        device = catalog.device(name)
        beside = catalog.beside(device.topology, name)
        return Cluster(count, device, catalog.topology(topology or beside))

    @property
    def num_hosts(self) -> int:
        """Hosts, the last perhaps not full."""
        return -(-self.count // self.topology.host_size)
