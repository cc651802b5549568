"""The hardware files: those of tutti by name, a user's own by path."""

from __future__ import annotations

import difflib
import warnings
from functools import cache
from itertools import combinations
from pathlib import Path

from tutti.errors import PlanError
from tutti.hardware.accelerator import Device, device_of
from tutti.hardware.figures import CALIBRATE, read_table
from tutti.hardware.link import Link, link_of
from tutti.hardware.topology import Topology, topology_of

_FOLDER = Path(__file__).parent
# Data sheets round their figures.
_TOLERANCE = 0.01
_BY_WIDTH = ("float64", "float32", "tf32", "bfloat16")


def names_of(kind: str) -> list[str]:
    """The names that tutti knows; `kind` is devices, links or topologies."""
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.toml"))


@cache
def device(name: str) -> Device:
    """A device by name, `h100` or `H100`, or by the path of a TOML file.

    Raises:
        PlanError: an unknown name; a file with a figure that cannot be right, or with a sparse peak.
    """
    path = _path("devices", name)
    made = device_of(read_table(path), path)
    if path.parent != _FOLDER / "devices":
        _refuse_sparse(made, path)
        _refuse_faster_wide(made, path)
        _warn_of_no_bfloat16(made, path)
    return made


def is_device(name: str) -> bool:
    """Whether there is a device of this name, or a file at this path."""
    return name.lower() in names_of("devices") or (name.endswith(".toml") and Path(name).is_file())


@cache
def link(name: str) -> Link:
    """A link by name, `nvlink4`, or by the path of a TOML file.

    Raises:
        PlanError: an unknown name; a file with a figure that cannot be right.
    """
    path = _path("links", name)
    return link_of(read_table(path), path)


@cache
def topology(name: str) -> Topology:
    """A topology by name, `dgx-h100`, or by the path of a TOML file.

    Raises:
        PlanError: an unknown name; a file with a figure that cannot be right.
    """
    path = _path("topologies", name)

    return topology_of(read_table(path), path, lambda other: link(beside(other, str(path))))


def beside(name: str, path: str) -> str:
    """The path of a file that another one at `path` names, if it is in the same folder; else the name."""
    file = Path(path).parent / name
    return str(file) if name.endswith(".toml") and file.exists() else name


def _path(kind: str, name: str) -> Path:
    known = names_of(kind)
    if name.lower() in known:
        return _FOLDER / kind / f"{name.lower()}.toml"
    if name.endswith(".toml"):
        return Path(name)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    if Path(name).is_file():
        raise PlanError(
            f"{name} is a file whose name does not end in .toml",
            why=f"a hardware file is TOML; other names are {', '.join(known)}",
            fix=f"rename it to {Path(name).stem}.toml",
        )
    one = {"devices": "device", "links": "link", "topologies": "topology"}[kind]
    raise PlanError(
        f'unknown {one} "{name}"',
        why=f"the {kind} are {', '.join(known)}",
        fix=(f"did you mean {near[0]}? Otherwise " if near else "") + CALIBRATE,
    )


def _refuse_faster_wide(made: Device, path: Path) -> None:
    """Refuse a peak of a wider dtype above that of a narrower one; processors, measured here, may have it."""
    if made.call_seconds is not None:
        return
    for (wide, more), (narrow, less) in combinations(
        ((name, made.peak[name]) for name in _BY_WIDTH if name in made.peak), 2
    ):
        if more.value > (1 + _TOLERANCE) * less.value:
            raise PlanError(
                f"{wide} = {more.value:g} is above the peak of {narrow}, {less.value:g}",
                at=f"{path} [peak]",
                why="no accelerator computes faster in the wider dtype",
                fix=f"the dense figures of its data sheet; no line of {narrow}, if the device emulates it",
            )


def _warn_of_no_bfloat16(made: Device, path: Path) -> None:
    if "bfloat16" not in made.peak and "float32" in made.peak:
        value = made.peak["float32"].value
        warnings.warn(
            f"{path} [peak] has no bfloat16: operations in it have the peak of float32, {value:g}; add a "
            "line of bfloat16 (with the figure of float32, if the device has none)",
            stacklevel=3,
        )


def _refuse_sparse(made: Device, path: Path) -> None:
    """Refuse a peak that is the sparse figure of a known device."""
    for other in map(device, names_of("devices")):
        for dtype, figure in other.peak.items():
            given = made.peak.get(dtype)
            sparse = other.sparsity.value * figure.value if other.sparsity else 0.0
            if given and abs(given.value - sparse) < _TOLERANCE * given.value:
                raise PlanError(
                    f"{dtype} = {given.value:g} is a sparse peak, not a dense one",
                    at=f"{path} [peak]",
                    why=f"the dense peak of {other.name} is {figure.value:g}; its data sheet prints the "
                    "figure with structured sparsity, which training does not use",
                    fix=f"{dtype} = {figure.value:g}, if it is this device",
                )
