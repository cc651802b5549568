"""Published iterations of GPTs on clusters: rows of a CSV, and groups of rows of one problem.

Columns: devices, global_batch, micro_batch, width, heads, layers, sequence, tensor, data, pipe, milliseconds,
nodes (`one` or `several`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

# Rows whose position in the file is a multiple of this fit the constants of the hardware files.
FIT_EVERY = 3


@dataclass(frozen=True)
class Iteration:
    """One row: a problem, a layout, and the milliseconds of a step."""

    devices: int
    global_batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipe: int
    milliseconds: float
    nodes: str

    @property
    def on_one_host(self) -> bool:
        """Whether all devices are of one host."""
        return self.nodes == "one"

    @property
    def num_micro(self) -> int:
        """Micro-batches of a step on each data rank."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def problem(self) -> tuple[int, ...]:
        """What layouts of one problem share."""
        return (
            self.devices,
            self.global_batch,
            self.width,
            self.heads,
            self.layers,
            self.sequence,
        )

    @property
    def layout(self) -> str:
        """The layout as text."""
        return (
            f"data={self.data} tensor={self.tensor} pipe={self.pipe} micro={self.num_micro} "
            f"({self.micro_batch} rows each)"
        )


def read_iterations(path: Path) -> list[Iteration]:
    """The rows of a file.

    Raises:
        SystemExit: the file cannot be read, lacks a column, or has a row that is no layout of its devices.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error}") from None
    names = [f.name for f in fields(Iteration)]
    missing = [name for name in names if not rows or name not in rows[0]]
    if missing:
        raise SystemExit(f"{path} has no rows, or lacks columns: {', '.join(missing)}")
    return [_iteration(row, f"{path}, row {i}") for i, row in enumerate(rows, 1)]


def _iteration(row: dict[str, str], at: str) -> Iteration:
    try:
        numbers = {f.name: int(row[f.name]) for f in fields(Iteration) if f.type == "int"}
        made = Iteration(**numbers, milliseconds=float(row["milliseconds"]), nodes=row["nodes"])
    except (TypeError, ValueError) as error:
        raise SystemExit(f"{at}: {error}") from None
    fits = made.tensor * made.data * made.pipe == made.devices
    if not fits or made.num_micro * made.data * made.micro_batch != made.global_batch:
        raise SystemExit(
            f"{at}: not a layout of {made.devices} devices and {made.global_batch} rows"
        )
    return made


def groups_of(rows: Sequence[Iteration], least: int) -> list[list[int]]:
    """The positions of the rows of each problem with at least so many layouts."""
    groups = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.problem].append(i)
    return [group for group in groups.values() if len(group) >= least]
