"""The hardware files of this machine, as `tutti calibrate` writes them.

this-machine.toml          the device: one rank's share of the processors, or one GPU
this-machine-link.toml     between ranks of this host
this-machine-host.toml     the topology
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.environment import HARDWARE
from tutti.errors import PlanError
from tutti.planner.hardware.cluster import Cluster

NAME = "this-machine"


@dataclass(frozen=True)
class Measured:
    """What a calibration found.

    name: of the machine. num_devices: ranks of a full host. peaks: FLOP/s of the best matmul by dtype.
    memory: bytes of a device. bandwidth: bytes per second that a kernel moves. launch: seconds of an op that
    does nothing. call: seconds of a call of a step beside its ops. start: seconds of a collective of a few
    bytes. rate: bytes per second of a large one, as in a ring. message: bytes per second from rank to rank.
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


def folder() -> Path:
    """Of this machine's files: `TUTTI_HARDWARE`, else in the user's cache."""
    given = HARDWARE.read()
    return Path(given) if given else Path.home() / ".cache" / "tutti" / "hardware"


def cluster_here(path: Path | None = None) -> Cluster:
    """This machine, from its files.

    Raises:
        PlanError: it has not been calibrated.
    """
    device = path or folder() / f"{NAME}.toml"
    if not device.exists():
        raise PlanError(
            "this machine has not been calibrated",
            why=f"there is no {device}",
            fix='run "tutti calibrate" (a minute), or name devices: --devices "64 x h100"',
        )
    one = Cluster.parse(str(device))
    return Cluster(one.topology.host_size, one.device, one.topology)


def write(measured: Measured, where: Path) -> Path:
    """Write the three files into a folder; returns that of the device.

    Raises:
        PlanError: the folder cannot be written.
    """
    texts = {
        f"{NAME}.toml": _device(measured),
        f"{NAME}-link.toml": _link(measured),
        f"{NAME}-host.toml": _topology(measured),
    }
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
"""


def _link(one: Measured) -> str:
    return f"""# Between ranks of this machine.
name = "{one.name}: between ranks"
bandwidth = {_figure(one.rate)}
efficiency = {_figure(1, "the bandwidth is measured")}
latency = {_figure(0, "part of start")}
start = {_figure(one.start)}
message_efficiency = {_figure(max(0.01, min(1.0, one.message / one.rate)))}
"""


def _topology(one: Measured) -> str:
    return f"""# This machine alone; links between hosts are not measured.
name = "{one.name}"
devices_per_host = {_figure(one.num_devices, "processors, or GPUs")}
inside = "{NAME}-link.toml"
between = "ethernet-100g"
adapters = {_figure(1, "not measured")}
"""
