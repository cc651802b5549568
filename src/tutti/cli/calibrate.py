"""`tutti calibrate`: measure this machine, for plans and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tutti.planning.hardware_files import MeasuredHosts


def calibrate(
    num_devices: Annotated[
        int | None,
        typer.Option("-n", min=1, help="Devices; by default each GPU, or each processor."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Write the files here; by default in the user's cache."),
    ] = None,
) -> None:
    """Measure this machine's matmuls, memory and collectives, and write hardware files.

    Started by torchrun on several hosts, it measures the links between them, too, and writes on each.
    """
    from tutti.calibration import cluster_links, measurement
    from tutti.calibration.other_work import CALIBRATION, warn_of_other_work
    from tutti.errors import PlanError
    from tutti.planning import hardware_files
    from tutti.quantities import format_nbytes, format_seconds

    between = None
    if not cluster_links.is_one_of_several():
        warn_of_other_work(CALIBRATION)
        found = measurement.measured(num_devices)
    elif num_devices is not None:
        raise PlanError(
            "-n does not go with torchrun",
            fix="--nproc-per-node of torchrun: a rank for each device",
        )
    else:
        found, between = cluster_links.measured_together()
        if not cluster_links.leads_host():
            return
    path = hardware_files.write(found, output or hardware_files.folder(), between)
    peaks = ", ".join(f"{x / 1e9:.3g} GFLOP/s {name}" for name, x in found.peaks.items())
    print(
        f"{found.name}\n"
        f"  matmul of a device  {peaks}\n"
        f"  memory of a device  {format_nbytes(found.memory)}, {format_nbytes(found.bandwidth)}/s\n"
        f"  op, call of a step  {format_seconds(found.launch)}, {format_seconds(found.call)}\n"
        f"  all-reduce          {format_seconds(found.start)}, {format_nbytes(found.rate)}/s\n"
        f"{_between_text(between)}written to {path}",
        flush=True,
    )


def _between_text(hosts: MeasuredHosts | None) -> str:
    from tutti.quantities import format_nbytes, format_seconds

    if hosts is None:
        return ""
    return (
        f"  between {hosts.num_hosts} hosts     {format_seconds(hosts.start)}, "
        f"{format_nbytes(hosts.rate)}/s for each device\n"
    )
