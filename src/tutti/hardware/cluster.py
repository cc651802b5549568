"""A cluster as text: `64 x h100`, `64xh100` or `64 h100`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.accelerator import Device
from tutti.hardware.topology import Topology

_TEXT = re.compile(r"(?:(?P<count>[-+]?\d+)(?:\s*[x×*]\s*|\s+))?(?P<name>\S.*)")
_MOST = 10**7
_COUNTS = r"\d+(?:\s*(?:hosts?|nodes?)?\s*[x×*]\s*|\s+(?:hosts?|nodes?)(?:\s+of)?\s+)\d+"
# Texts that people write for a cluster, the fix for each, from its numbers and its name, and why.
_ONE_KIND = "a cluster has devices of one kind"
_HOSTS = "the topology of a device says how many a host has"
_OTHER_FORMS = (
    (
        re.compile(r"\d+"),
        lambda m: f'{m[0]} x NAME, such as "{m[0]} x h100"',
        "a count needs a device",
    ),
    (
        re.compile(r".*?\S\s*[,;+&]\s*\S.*"),
        lambda m: "one of them, in a plan of its own",
        _ONE_KIND,
    ),
    (
        re.compile(rf"(?P<counts>{_COUNTS})(?:\s*[x×*]\s*|\s+)(?P<name>\S+)"),
        lambda m: f'"{math.prod(map(int, re.findall(r"[0-9]+", m["counts"])))} x {m["name"]}"',
        _HOSTS,
    ),
    (
        re.compile(r"(?P<whole>\d*)\.\d+(?:\s*[x×*]\s*|\s+)(?P<name>\S+)"),
        lambda m: f'"{max(1, int(m["whole"] or 0))} x {m["name"]}"',
        "the count of devices is a whole number",
    ),
    (
        re.compile(r"(?P<name>[A-Za-z]\S*)\s*[x×*]\s*(?P<count>\d+)"),
        lambda m: f'"{m["count"]} x {m["name"]}"',
        "the count comes first",
    ),
)


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
        if not catalog.is_device(name):
            _refuse_other_forms(text)
        device = catalog.device(name)
        beside = catalog.beside(device.topology, name)
        return Cluster(count, device, catalog.topology(topology or beside))

    @property
    def num_hosts(self) -> int:
        """Hosts, the last perhaps not full."""
        return -(-self.count // self.topology.host_size)


def _refuse_other_forms(text: str) -> None:
    """Raise what is meant by a text of another form, if it is a usual one."""
    for form, fix, why in _OTHER_FORMS:
        if found := form.fullmatch(text.strip()):
            raise PlanError(f'cannot read the devices "{text}"', why=why, fix=fix(found))
