"""A topology as data: devices of a host, the link inside, the link between hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.hardware.figures import Bounds, Figure, FigureTable
from tutti.hardware.link import Link


@dataclass(frozen=True)
class Topology:
    """Hosts of `devices_per_host` devices.

    inside: the link of each device to the others of its host. between: one network adapter.
    adapters: network adapters of a host; its devices share them.
    """

    name: str
    devices_per_host: Figure
    inside: Link
    between: Link
    adapters: Figure

    @property
    def host_size(self) -> int:
        """Devices of a host."""
        return int(self.devices_per_host.value)


def topology_of(values: Mapping[str, Any], path: Path, link: Callable[[str], Link]) -> Topology:
    """The topology of a file's table; `link` gives a link by its name.

    Raises:
        PlanError: a figure is missing, has no source or cannot be right; an unknown key or link.
    """
    table = FigureTable(values, str(path))
    table.only(("name", "devices_per_host", "inside", "between", "adapters"))
    return Topology(
        name=table.text("name"),
        devices_per_host=table.figure(
            "devices_per_host", Bounds(1, 100_000, "devices", whole=True)
        ),
        inside=link(table.text("inside")),
        between=link(table.text("between")),
        adapters=table.figure("adapters", Bounds(1, 100_000, "adapters of a host", whole=True)),
    )
