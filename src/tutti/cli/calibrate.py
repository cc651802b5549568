"""`tutti calibrate`: measure this machine, for plans and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    """Measure this machine's matmuls, memory and collectives, and write hardware files."""
    from tutti.calibration import measurement
    from tutti.planning import hardware_files
    from tutti.quantities import format_nbytes, format_seconds

    found = measurement.measured(num_devices)
    path = hardware_files.write(found, output or hardware_files.folder())
    peaks = ", ".join(f"{x / 1e9:.3g} GFLOP/s {name}" for name, x in found.peaks.items())
    print(
        f"{found.name}\n"
        f"  matmul of a device  {peaks}\n"
        f"  memory of a device  {format_nbytes(found.memory)}, {format_nbytes(found.bandwidth)}/s\n"
        f"  op, call of a step  {format_seconds(found.launch)}, {format_seconds(found.call)}\n"
        f"  all-reduce          {format_seconds(found.start)}, {format_nbytes(found.rate)}/s\n"
        f"written to {path}",
        flush=True,
    )
