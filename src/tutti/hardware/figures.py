"""Figures of hardware files: a number with its source, checked against what is possible.

bandwidth = { value = 2.039e12, source = "NVIDIA A100 data sheet" }
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tutti.errors import PlanError

CALIBRATE = (
    "copy the file of a similar one, replace its figures by your data sheet's dense ones and by your own "
    "measurements (a large matmul, a copy in memory, nccl-tests), and give the path of the copy"
)


@dataclass(frozen=True)
class Figure:
    """A number and where it is from; `fitted` says that it was fitted to published iterations."""

    value: float
    source: str
    fitted: bool = False


class Bounds(NamedTuple):
    """The possible values of a figure, their unit, a hint for a value outside, and whether it is a count."""

    low: float
    high: float
    unit: str
    hint: str = ""
    whole: bool = False


SHARE = Bounds(0.01, 1.0, "of the peak")
SECONDS = Bounds(0.0, 0.1, "seconds", "a figure in microseconds needs e-6")
RATE = Bounds(1e5, 5e13, "bytes per second", "a figure in GB/s needs e9")
_LARGEST_TILE = 65_536


def read_table(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        PlanError: the file cannot be read, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise PlanError("cannot read the hardware file", at=str(path), why=str(error)) from None
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, endless digits
        raise PlanError("the hardware file is not TOML", at=str(path), why=str(error)) from None


class FigureTable:
    """One table of a hardware file; every key must be asked for, and every figure has a source."""

    def __init__(self, values: Any, at: str) -> None:
        if not isinstance(values, Mapping):
            raise PlanError(f"{at} is not a table", at=at, fix="[table] with a figure a line")
        self.values, self.at = values, at

    def only(self, known: Iterable[str]) -> None:
        """Refuse keys that are not `known`.

        Raises:
            PlanError: an unknown key.
        """
        names = list(known)
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                raise PlanError(
                    f'unknown key "{key}"',
                    at=self.at,
                    why=f"the keys are {', '.join(names)}",
                    fix=f"did you mean {near[0]}?" if near else "remove it",
                )

    def table(self, key: str) -> FigureTable:
        """A table inside."""
        return FigureTable(self._required(key), f"{self.at} [{key}]")

    def text(self, key: str) -> str:
        """A name."""
        value = self._required(key)
        if not isinstance(value, str) or not value.strip():
            raise PlanError(f"{key} must be a name in quotes", at=self.at)
        return value

    def figure(self, key: str, bounds: Bounds) -> Figure:
        """A figure within bounds.

        Raises:
            PlanError: it is missing, has no source, is no number, or cannot be right.
        """
        found = self._figure_table(key)
        value = found.values["value"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{key} is not a number: {value!r}", at=self.at)
        if not bounds.low <= value <= bounds.high or (bounds.whole and value % 1):
            what = "is negative" if value < 0 else "cannot be right"
            shown = f"{value:.10g}" if abs(value) <= sys.float_info.max else str(value)
            number = "whole numbers from " if bounds.whole else ""
            raise PlanError(
                f"{key} = {shown} {what}",
                at=self.at,
                why=f"possible are {number}{bounds.low:g} to {bounds.high:g} {bounds.unit}",
                fix=bounds.hint or "the figure of a data sheet or of a measurement, in this unit",
            )
        fitted = found.values.get("fitted", False)
        if not isinstance(fitted, bool):
            raise PlanError(f"fitted must be true or false, and is {fitted!r}", at=found.at)
        return Figure(float(value), found.text("source"), fitted)

    def optional(self, key: str, bounds: Bounds) -> Figure | None:
        """As `figure`; None without the key."""
        return self.figure(key, bounds) if key in self.values else None

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """Pairs of whole numbers: sizes of tiles.

        Raises:
            PlanError: they are missing, have no source, or are no such pairs.
        """
        value = self._figure_table(key).values["value"]
        if not isinstance(value, list) or not value or not all(map(_is_tile, value)):
            raise PlanError(
                f"{key} must be a list of pairs such as [[256, 128]]",
                at=self.at,
                why=f"a tile has whole numbers of rows and columns, from 1 to {_LARGEST_TILE}",
            )
        return tuple((a, b) for a, b in value)

    def _figure_table(self, key: str) -> FigureTable:
        found = self._required(key)
        if not isinstance(found, Mapping):
            raise PlanError(
                f"{key} has no source",
                at=self.at,
                fix=f'{key} = {{ value = {found}, source = "..." }}',
            )
        table = FigureTable(found, f"{self.at} {key}")
        table.only(("value", "source", "fitted"))
        table._required("value")
        table.text("source")
        return table

    def _required(self, key: str) -> Any:
        if key not in self.values:
            raise PlanError(f"{key} is missing", at=self.at, fix=CALIBRATE)
        return self.values[key]


def _is_tile(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(n) is int and 1 <= n <= _LARGEST_TILE for n in pair)
    )
