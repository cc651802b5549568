"""Cells of a table of verified programs: models by layouts, kept as Markdown and JSON."""

from __future__ import annotations

import json
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import machine
from tutti.errors import TuttiError

LARGEST = 1e-9


@dataclass(frozen=True)
class Cell:
    """One model under one layout; `error` is what was raised, or "".

    `gathered` are the ops whose operands every rank gathers, since no rule says how they may be split.
    """

    model: str
    layout: str
    max_error: float
    seconds: float
    error: str = ""
    gathered: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it is the same step."""
        return not self.error and self.max_error < LARGEST

    def __str__(self) -> str:
        if self.error:
            return self.error.splitlines()[0][:60]
        return f"{self.max_error:.0e}" + (
            f", {len(self.gathered)} gathered" if self.gathered else ""
        )


def cell(model: str, layout: str, verify: Callable[[], tuple[float, Sequence[str]]]) -> Cell:
    """What `verify` finds: the largest error, and the ops that are gathered."""
    start = time.perf_counter()
    found, gathered, error = float("nan"), (), ""
    try:
        found, gathered = verify()
    except TuttiError as refused:
        error = str(refused)
    except Exception:
        error = traceback.format_exc().strip().splitlines()[-1]
    error = error.replace(f"{sysconfig.get_path('purelib')}/", "")  # lines as on any machine
    return Cell(model, layout, found, time.perf_counter() - start, error, tuple(gathered))


def table(found: list[Cell], *, rows: str = "layout") -> str:
    """Layouts by models, or with `rows="model"` models by layouts; a cell that is not ok is bold."""
    columns = "model" if rows == "layout" else "layout"
    heads = dict.fromkeys(getattr(c, columns) for c in found)
    at = {(getattr(c, rows), getattr(c, columns)): c for c in found}
    shown = [f"`{h}`" if columns == "layout" else h for h in heads]
    lines = [f"| {rows} | {' | '.join(shown)} |", "| --- |" + " --- |" * len(heads)]
    for name in dict.fromkeys(getattr(c, rows) for c in found):
        row = [at.get((name, head)) for head in heads]
        texts = ["" if c is None else str(c) if c.ok else f"**{c}**" for c in row]
        lines.append(f"| {f'`{name}`' if rows == 'layout' else name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def write(found: list[Cell], path: Path, title: str, note: str, *, rows: str = "layout") -> None:
    """The table and the cells, beside each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = machine.describe()
    failed = [c for c in found if not c.ok]
    refused = [c for c in failed if c.error]
    gathered = sorted({g for c in found for g in c.gathered})
    text = [
        f"# {title}",
        f"{len(found)} cells: {len(found) - len(failed)} are the same step, {len(refused)} are refused, "
        f"{len(failed) - len(refused)} are not the same; {note}, torch {about['torch']}, commit "
        f"{about['commit']}. A cell is the largest relative difference to one device.",
        table(found, rows=rows),
        *([f"Gathered for want of a rule: {', '.join(gathered)}."] if gathered else []),
        *(f"{c.model} under `{c.layout}`:\n\n    {_indented(c)}" for c in failed),
    ]
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    made = {"machine": about, "cells": [asdict(c) for c in found]}
    path.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


def _indented(found: Cell) -> str:
    return (found.error or str(found.max_error)).replace("\n", "\n    ")
