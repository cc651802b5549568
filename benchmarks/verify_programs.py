"""Public training programs under layouts, compared with PyTorch over four calls and what lies between.

    python -m benchmarks.verify_programs                             # all of them, a table on the screen
    python -m benchmarks.verify_programs --programs nanoGPT vae --columns one data=2
    python -m benchmarks.verify_programs --write                     # and docs/programs.md

A row is a script of the same shape and idioms as a public one (`benchmarks/programs`), or one that uses a
package as it is. Columns: the distributed step on one device; `verify` of the first step under four
layouts; two real ranks. One device and ranks run the whole script and are compared with it as PyTorch
runs it, in float64: all that each call returns, what the script does in between, weights, slots and counters
at the end. A value that a nudge of the last bits of the weights moves is judged by how far.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.command_line import parser
from benchmarks.programs import Program, Script, programs
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
from benchmarks.programs.report import counts, document, row_text

VERIFIED = ("data=2", "data=2 zero=3", "tensor=2", "pipe=2 micro=2")
ON_RANKS = ("data=2", "data=2 zero=3", "pipe=2 micro=2")
COLUMNS = ("one", *(f"verify {v}" for v in VERIFIED), *(f"ranks {r}" for r in ON_RANKS))
SECONDS = 150.0  # for one answer
RANK_SECONDS = 150.0
Row = dict[str, Cell]
_KEEPING = threading.Lock()


def built(program: Program) -> Script:
    """The script, the same at each call."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return program.build()


def placed(program: Program, script: Script) -> Mapping[str, str]:
    """Where `tensor` splits: as the program says, else every linear layer by its outputs."""
    if program.place is not None:
        return program.place
    found = {}
    for module in modules(script.model).values():
        known = dict(module.named_parameters())  # a tied weight has one name
        for name, one in module.named_modules():
            weight = f"{name}.weight" if name else "weight"
            if isinstance(one, nn.Linear) and one.out_features % 2 == 0 and weight in known:
                found[weight] = "tensor, -"
    return found


def _verify(program: Program, layout: str) -> Cell:
    script = built(program)
    place = placed(program, script) if "tensor" in layout else None
    if place is not None and not place:
        return Cell("n/a")
    return verified(script, layout, place)


def local(name: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """In one process: eager, eager nudged, then cells by column."""
    program = programs()[name]
    wanted = guarded(lambda: eager(built(program)))
    yield "eager", wanted
    if isinstance(wanted, Cell):
        return
    nudge = guarded(lambda: nudged(built(program)))
    yield "nudged", nudge
    if "one" in columns:
        found = guarded(lambda: distributed(built(program), ""))
        yield "one", compared(found, wanted, nudge, within=program.within)
    for layout in VERIFIED:
        if f"verify {layout}" in columns:
            yield f"verify {layout}", guarded(lambda at=layout: _verify(program, at))


def on_rank(name: str, layout: str) -> Iterator[Any]:
    """The trace on one rank, or how it failed."""
    program = programs()[name]
    yield guarded(lambda: distributed(built(program), layout))


def row(program: Program, columns: Sequence[str]) -> Row:
    """All cells of one program."""
    if program.missing:
        return dict.fromkeys(columns, Cell("not installed"))
    cells: Row = {}
    wanted, nudge = None, None
    for part in Isolated(local, (program.name, columns)).answers(SECONDS):
        if isinstance(part, Ended):
            unanswered = next((c for c in columns if c not in cells), columns[0])
            cells[unanswered] = Cell("RAW", part.why)
            break
        name, value = part
        if name == "eager":
            wanted = value
        elif name == "nudged":
            nudge = None if isinstance(value, Cell) else value
        else:
            cells[name] = value
    if wanted is None or isinstance(wanted, Cell):
        return dict.fromkeys(columns, Cell("broken", f"in PyTorch: {wanted}"))
    for layout in ON_RANKS:
        if f"ranks {layout}" in columns:
            playing = Ranks(on_rank, (program.name, layout), n=2)
            answers = next(iter(playing.answers(RANK_SECONDS)), [Ended("no answer")])
            cells[f"ranks {layout}"] = _worst(
                [_of_rank(a, wanted, nudge, program.within) for a in answers]
            )
    return {c: cells.get(c, Cell("n/a")) for c in columns}


def _of_rank(answer: Any, wanted: Any, nudge: Any, within: float) -> Cell:
    if isinstance(answer, Ended):
        return Cell("RAW", answer.why)
    return compared(answer, wanted, nudge, within=within)


def _worst(cells: list[Cell]) -> Cell:
    order = ("WRONG", "RAW", "refused", "same")
    return min(cells, key=lambda c: order.index(c.kind))


def rows(
    chosen: Sequence[Program],
    columns: Sequence[str],
    jobs: int,
    note: Callable[[Program, Row, float], None],
) -> dict[str, Row]:
    """Row by row, `jobs` at a time."""
    found: dict[str, Row] = {}

    def one(program: Program) -> None:
        start = time.monotonic()
        try:
            found[program.name] = row(program, columns)
        except Exception as error:  # of this table's own: shown, and the others go on
            found[program.name] = dict.fromkeys(columns, Cell("RAW", f"table: {error!r}"))
        note(program, found[program.name], time.monotonic() - start)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, chosen))
    return {p.name: found[p.name] for p in chosen}


def main() -> None:
    """Run, show, and keep if asked."""
    options = {"programs": (), "columns": (), "jobs": 2, "write": False}
    args = parser(__doc__, **options, out=Path("runs/programs.json")).parse_args()
    words = [w.lower() for w in args.programs]
    known = programs()
    chosen = [
        p
        for p in known.values()
        if not words or p.family in words or any(w in p.name.lower() for w in words)
    ]
    columns = [c for c in COLUMNS if not args.columns or any(w in c for w in args.columns)]

    def note(program: Program, row: Row, seconds: float) -> None:
        print(row_text(program, row, seconds), flush=True)
        merged(args.out, {program.name: row}, known)

    found = rows(chosen, columns, args.jobs, note)
    everything = merged(args.out, found, known)
    print(f"\n{counts(found, known)}")
    if args.write:
        page = document(known, everything, COLUMNS)
        (Path(__file__).parents[1] / "docs" / "programs.md").write_text(page)
    sys.exit(any(cell.bad for one in found.values() for cell in one.values()))


def merged(path: Path, found: Mapping[str, Row], known: Mapping[str, Program]) -> dict[str, Row]:
    """The rows kept at `path` with those of this run in their place, cell by cell, and kept again."""
    with _KEEPING:
        return _merged(path, found, known)


def _merged(path: Path, found: Mapping[str, Row], known: Mapping[str, Program]) -> dict[str, Row]:
    old = json.loads(path.read_text()) if path.exists() else {}
    both: dict[str, Row] = {}
    for name in known:
        cells = {c: Cell(*x) for c, x in old.get(name, {}).items()} | dict(found.get(name, {}))
        if cells:
            both[name] = {c: cells.get(c, Cell("not run")) for c in COLUMNS}
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {n: {c: (x.kind, x.about) for c, x in row.items()} for n, row in both.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n")
    return both


if __name__ == "__main__":
    main()
