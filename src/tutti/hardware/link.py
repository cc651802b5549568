"""A link as data: what one device sends over it, and what a collective reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.hardware.figures import RATE, SECONDS, SHARE, Figure, FigureTable

_KEYS = (
    "name",
    "bandwidth",
    "efficiency",
    "copy_bandwidth",
    "latency",
    "start",
    "message_efficiency",
    "crowded_start",
)


@dataclass(frozen=True)
class Link:
    """One link of a device, or of a network adapter.

    bandwidth: bytes per second in one direction.
    efficiency: the share of it that a large collective reaches.
    copy_bandwidth: bytes per second at which a collective passes its operand through the device's memory.
    latency: seconds of one step from neighbor to neighbor.
    start: seconds before the first byte of a collective.
    message_efficiency: the share of the bandwidth that a message between two pipeline ranks reaches.
    crowded_start: the same where several ranks take turns on a processor, for each of these ranks, and of a
        message; measured on this machine only.
    """

    name: str
    bandwidth: Figure
    efficiency: Figure
    copy_bandwidth: Figure | None
    latency: Figure
    start: Figure
    message_efficiency: Figure
    crowded_start: Figure | None = None


def link_of(values: Mapping[str, Any], path: Path) -> Link:
    """The link of a file's table.

    Raises:
        PlanError: a figure is missing, has no source or cannot be right; an unknown key.
    """
    table = FigureTable(values, str(path))
    table.only(_KEYS)
    return Link(
        name=table.text("name"),
        bandwidth=table.figure("bandwidth", RATE),
        efficiency=table.figure("efficiency", SHARE),
        copy_bandwidth=table.optional("copy_bandwidth", RATE),
        latency=table.figure("latency", SECONDS),
        start=table.figure("start", SECONDS),
        message_efficiency=table.figure("message_efficiency", SHARE),
        crowded_start=table.optional("crowded_start", SECONDS),
    )
