"""The hardware files of this machine, as `tutti calibrate` writes them.

this-machine.toml          the device: one rank's share of the processors, or one GPU
this-machine-link.toml     between ranks of this host
this-machine-host.toml     the topology
this-machine-between.toml  between hosts, if several were measured
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tutti.environment import HARDWARE
from tutti.errors import PlanError
from tutti.hardware import catalog
from tutti.hardware.cluster import Cluster

NAME = "this-machine"
_BETWEEN = f"{NAME}-between.toml"


@dataclass(frozen=True)
class Measured:
    """What a calibration found.

    name: of the machine. num_devices: ranks of a full host. peaks: FLOP/s of the best matmul by dtype.
    memory: bytes of a device. bandwidth: bytes per second that a kernel moves. launch: seconds of an op that
    does nothing. call: seconds of a call of a step beside its ops. start: seconds of a collective of a few
    bytes, with the wait for the others. rate: bytes per second of a large one, as in a ring. message: bytes
    per second from rank to rank. probe: seconds of the speed probe meanwhile; 0 on GPUs.
    crowded: as `start`, for each of the ranks that take turns on a processor; 0 on GPUs.
    """

    name: str
    num_devices: int
    peaks: Mapping[str, float]
    memory: float
    bandwidth: float
    launch: float
    call: float
    start: float
    rate: float
    message: float
    probe: float = 0.0
    crowded: float = 0.0


@dataclass(frozen=True)
class MeasuredHosts:
    """What a calibration found between hosts, while all devices of a host exchange values at the same time.

    start: seconds of a collective of a few bytes. rate: bytes per second of a large one, as in a ring, for
    each device. message: bytes per second from a rank to one on the next host.
    """

    num_hosts: int
    start: float
    rate: float
    message: float


def slowest(hosts: Sequence[Measured]) -> Measured:
    """The slowest figure of each kind, of hosts with equally many devices; the name is that of the first."""

    def worst(name: str) -> float:
        choose = max if name in ("launch", "call", "start", "probe", "crowded") else min
        return choose(getattr(one, name) for one in hosts)

    first = hosts[0]
    names = [f.name for f in fields(Measured) if f.type == "float"]
    peaks = {name: min(one.peaks[name] for one in hosts) for name in first.peaks}
    return replace(first, peaks=peaks, **{name: worst(name) for name in names})


def folder() -> Path:
    """Of this machine's files: `TUTTI_HARDWARE`, else in the user's cache."""
    given = HARDWARE.read()
    return Path(given) if given else Path.home() / ".cache" / "tutti" / "hardware"


def cluster_of(text: str, topology: str | None = None) -> Cluster:
    """The cluster of `--devices`: as `Cluster.parse`; `16 x this-machine` has the files of this machine.

    Raises:
        PlanError: an unknown device; this machine has not been calibrated.
    """
    if not is_here(text):
        return Cluster.parse(text, topology)
    here = cluster_here()
    if not (count := text.strip()[: -len(NAME)].strip()):
        return replace(here, topology=catalog.topology(topology)) if topology else here
    made = Cluster.parse(f"{count} {folder() / f'{NAME}.toml'}", topology)
    if made.num_hosts > 1 and not topology and not (folder() / _BETWEEN).exists():
        warnings.warn(
            "the links between hosts were not measured: the plan assumes Ethernet of 100 Gbit/s; on each "
            f"host run torchrun --nnodes {made.num_hosts} ... -m tutti calibrate, or name a --topology",
            stacklevel=2,
        )
    return made


def is_here(text: str) -> bool:
    """Whether the text of `--devices` names this machine."""
    return text.strip().lower().endswith(NAME)


def cluster_here(path: Path | None = None) -> Cluster:
    """This machine, one host, from its files.

    Raises:
        PlanError: it has not been calibrated.
    """
    device = path or folder() / f"{NAME}.toml"
    if not device.exists():
        raise PlanError(
            "this machine has not been calibrated",
            why=f"there is no {device}",
            fix='run "tutti calibrate" (a minute), or give a layout of your own; '
            "\"tutti plan --devices '64 x h100'\" needs no calibration",
        )
    one = Cluster.parse(str(device))
    return Cluster(one.topology.host_size, one.device, one.topology)


def write(measured: Measured, where: Path, between: MeasuredHosts | None = None) -> Path:
    """Write the files into a folder; returns that of the device.

    Raises:
        PlanError: the folder cannot be written.
    """
    texts = {
        f"{NAME}.toml": _device(measured),
        f"{NAME}-link.toml": _link(measured),
        f"{NAME}-host.toml": _topology(measured, between),
    }
    if between is not None:
        texts[_BETWEEN] = _link_between(measured, between)
    try:
        where.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (where / name).write_text(text)
    except OSError as error:
        raise PlanError(f"cannot write to {where}", why=str(error.strerror)) from None
    return where / f"{NAME}.toml"


def _figure(value: float, source: str = "measured by tutti calibrate") -> str:
    return f'{{ value = {value:.4g}, source = "{source}" }}'


def _device(one: Measured) -> str:
    peaks = "\n".join(f"{name} = {_figure(x)}" for name, x in one.peaks.items())
    probe = f"probe = {_figure(one.probe)}\n" if one.probe else ""
    share = _figure(1, "the peak is that of the best measured matmul")
    return f"""# One of {one.num_devices} devices of this machine, while all of them compute.
name = "{one.name}"
topology = "{NAME}-host.toml"

[peak]
{peaks}

[matmul]
efficiency = {share}
processors = {_figure(1, "one tile at a time")}
tiles = {{ value = [[64, 64], [32, 32], [16, 16], [8, 8]], source = "blocks of a CPU's kernels" }}

[memory]
capacity = {_figure(one.memory, "the machine's memory, divided by its devices")}
bandwidth = {_figure(one.bandwidth)}
efficiency = {_figure(1, "the bandwidth is measured")}

[launch]
kernel = {_figure(0, "launches are part of host")}
host = {_figure(one.launch)}
call = {_figure(one.call)}
{probe}"""


def _link(one: Measured) -> str:
    crowded = f"crowded_start = {_figure(one.crowded)}\n" if one.crowded else ""
    return f"""# Between ranks of this machine.
name = "{one.name}: between ranks"
bandwidth = {_figure(one.rate)}
efficiency = {_figure(1, "the bandwidth is measured")}
latency = {_figure(0, "part of start")}
start = {_figure(one.start)}
message_efficiency = {_figure(max(0.01, min(1.0, one.message / one.rate)))}
{crowded}"""


def _link_between(one: Measured, hosts: MeasuredHosts) -> str:
    """All devices of a host exchanged values at once: together they have the host's bandwidth."""
    return f"""# Between {hosts.num_hosts} hosts: the bandwidth of a host, which its devices share.
name = "{one.name}: between hosts"
bandwidth = {_figure(hosts.rate * one.num_devices)}
efficiency = {_figure(1, "the bandwidth is measured")}
latency = {_figure(0, "part of start")}
start = {_figure(hosts.start)}
message_efficiency = {_figure(max(0.01, min(1.0, hosts.message / hosts.rate)))}
"""


def _topology(one: Measured, between: MeasuredHosts | None) -> str:
    comment, link = "This machine alone; links between hosts are not measured.", "ethernet-100g"
    adapters = _figure(1, "not measured")
    if between is not None:
        comment, link = f"{between.num_hosts} hosts like this one.", _BETWEEN
        adapters = _figure(1, "the bandwidth is that of a host")
    return f"""# {comment}
name = "{one.name}"
devices_per_host = {_figure(one.num_devices, "processors, or GPUs")}
inside = "{NAME}-link.toml"
between = "{link}"
adapters = {adapters}
"""
