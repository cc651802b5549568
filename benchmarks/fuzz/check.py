"""Plays programs in all ways: as PyTorch does, on one device, by `verify`, on two real ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.programs.isolated import Ended, Isolated, Ranks
from benchmarks.programs.play import (
    Cell,
    compared,
    distributed,
    eager,
    guarded,
    modules,
    nudged,
    verified,
)
from benchmarks.programs.script import Script

LOCAL_SECONDS, RANK_SECONDS = 120.0, 60.0
VERIFIED = ("data=2", "data=2 zero=3", "tensor=2", "pipe=2 micro=2")
ON_RANKS = ("data=2", "data=2 zero=3")
Cells = dict[str, Cell]
LAYOUTS_OF_TENSOR = {"b.weight": "tensor, -"}


@dataclass(frozen=True)
class Work:
    """One program: its source, and the layouts that it is verified under and run with.

    seconds: how long it may take in one process.
    """

    key: str
    text: str
    verified: tuple[str, ...] = VERIFIED
    ranks: tuple[str, ...] = ON_RANKS
    seconds: float = LOCAL_SECONDS


def module_of(key: str, text: str) -> ModuleType:
    """The program as a module of its own, new at every call."""
    folder = Path(tempfile.gettempdir()) / f"fuzz-{key}-{hash(text) & 0xFFFFFF:x}"
    folder.mkdir(exist_ok=True)
    path = folder / f"program_{key}.py"
    if not path.exists() or path.read_text() != text:
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(text)
        written.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


def built(work: Work) -> Script:
    """The script, the same at each call."""
    torch.set_default_dtype(torch.float64)
    return module_of(work.key, work.text).build()


def place_of(script: Script) -> dict[str, str]:
    """Every linear layer by its outputs."""
    return {
        f"{name}.weight": "tensor, -"
        for module in modules(script.model).values()
        for name, one in module.named_modules()
        if isinstance(one, nn.Linear) and one.out_features % 2 == 0 and len(name) == 1
    }


def _verify(work: Work, layout: str) -> Cell:
    script = built(work)
    return verified(script, layout, place_of(script) if "tensor" in layout else None)


def locally(works: Sequence[Work]) -> Iterator[tuple[Any, Any, Cells]]:
    """For each program: the eager trace, that from nudged weights, and cells."""
    for work in works:
        wanted = guarded(lambda w=work: eager(built(w)))
        if isinstance(wanted, Cell):
            yield wanted, None, {}
            continue
        nudge = guarded(lambda w=work: nudged(built(w)))
        nudge = None if isinstance(nudge, Cell) else nudge
        cells = {"one": compared(guarded(lambda w=work: distributed(built(w), "")), wanted, nudge)}
        for layout in work.verified:
            cells[f"verify {layout}"] = guarded(lambda w=work, at=layout: _verify(w, at))
        yield wanted, nudge, cells


def on_rank(works: Sequence[Work]) -> Iterator[list[Any]]:
    """For each program: its traces, or how it failed, by layout."""
    for work in works:
        yield [guarded(lambda w=work, at=x: distributed(built(w), at)) for x in work.ranks]


def checked(works: Sequence[Work], *, ranks: bool = True) -> Iterator[tuple[Work, Cells]]:
    """All cells of every program; a process that breaks off costs its program alone."""
    traces: dict[str, tuple[Any, Any, Cells]] = {}

    def alone(left: Sequence[Work]) -> Iterator[Any]:
        return Isolated(locally, (left,)).answers(LOCAL_SECONDS, *(w.seconds for w in left))

    for work, answer in _each(works, alone):
        if isinstance(answer, Ended):
            traces[work.key] = (None, None, {"local": Cell("RAW", answer.why)})
        else:
            traces[work.key] = answer
    sound = [w for w in works if isinstance(traces[w.key][0], dict)] if ranks else []
    played = _each(sound, lambda left: Ranks(on_rank, (left,), n=2).answers(RANK_SECONDS))
    by_rank = {work.key: answers for work, answers in played}
    for work in works:
        wanted, nudge, cells = traces[work.key]
        if isinstance(wanted, Cell):
            cells = {"eager": Cell("broken", str(wanted))}
        if work.key in by_rank:
            cells |= _rank_cells(work, by_rank[work.key], wanted, nudge)
        yield work, cells


def _each(
    works: Sequence[Work], start: Callable[[Sequence[Work]], Iterator[Any]]
) -> Iterator[tuple[Work, Any]]:
    """What each program is answered; after a break a new process goes on with the next one."""
    left = list(works)
    while left:
        for answer in start(left):
            work = left.pop(0)
            yield work, answer
            broken = answer if isinstance(answer, list) else [answer]
            if any(isinstance(x, Ended) for x in broken):
                break


def _rank_cells(work: Work, answers: list[Any], wanted: Any, nudge: Any) -> Cells:
    found = {}
    for i, layout in enumerate(work.ranks):
        cells = [
            Cell("RAW", a.why) if isinstance(a, Ended) else compared(a[i], wanted, nudge)
            for a in answers
        ]
        order = ("WRONG", "RAW", "refused", "same")
        found[f"ranks {layout}"] = min(cells, key=lambda c: order.index(c.kind))
    return found


def show(file: str) -> None:
    """The cells of one program, on the screen."""
    warnings.simplefilter("ignore")
    work = Work(Path(file).stem.removeprefix("program_"), Path(file).read_text())
    for _, cells in checked([work]):
        for column, cell in cells.items():
            print(f"{column:22} {cell}")
