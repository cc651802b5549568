"""The table of programs, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.programs.play import Cell
from benchmarks.programs.script import Program

HEAD = """# Programs

`python -m benchmarks.verify_programs --write` makes this page.

{counts}

Each row is a small training script (`benchmarks/programs/scripts`), rewritten with the idioms of a
public one, or a user of the unmodified named package. It runs four calls and its usual code between them:
evaluations, schedules, averages of weights, changing numbers. `one` (one device) and `ranks`
(two real ranks) compare it in float64 with eager PyTorch: results, the code between calls, and weights,
buffers, optimizer state and counters at the end; a cell is the
largest relative difference. `verify` is `tutti.verify` of the first step. A value of pure rounding may differ
by its movement under changes of the last bits of the weights. *Changes* counts the changed
lines beside `step = tutti.distribute(...)`; with *whole*, the script reads or writes weights
between the calls, in a block `with tutti.whole(model):` if ranks keep shards of them. `n/a`: nothing
to split.
"""


def row_text(program: Program, row: Mapping[str, Cell], seconds: float) -> str:
    """A row on the screen."""
    cells = "\n".join(f"    {column:22} {cell}" for column, cell in row.items())
    return f"{program.name} ({program.family}, {seconds:.0f} s)\n{cells}"


def _runs(row: Mapping[str, Cell]) -> bool:
    """Whether it runs on one device and on ranks that split the batch, as far as it was tried."""
    tried = [c for column, c in row.items() if column == "one" or column.startswith("ranks data")]
    return all(c.kind in ("same", "not run") for c in tried)


def counts(found: Mapping[str, Mapping[str, Cell]], known: Mapping[str, Program]) -> str:
    """How many of what."""
    cells = [c for row in found.values() for c in row.values() if c.kind != "not run"]
    by_kind = Counter(c.kind for c in cells)
    ran = [
        n for n, row in found.items() if not any(c.kind == "not installed" for c in row.values())
    ]
    bad = [n for n in ran if any(c.bad for c in found[n].values())]
    as_is = [n for n in ran if known[n].changes == 0 and _runs(found[n])]
    parts = [f"{len(ran)} programs, {len(cells)} cells:"]
    parts.append(", ".join(f"{v} {k}" for k, v in by_kind.items() if v) + ".")
    parts.append(f"{len(as_is)} programs run under `data` with no change but the one line.")
    parts.append(f"{len(bad)} programs have a cell that is wrong or a raw traceback.")
    if missing := len(found) - len(ran):
        parts.append(f"{missing} are not installed.")
    return " ".join(parts)


def document(
    known: Mapping[str, Program], found: Mapping[str, Mapping[str, Cell]], columns: Sequence[str]
) -> str:
    """The page."""
    heads = [c.replace("verify ", "verify<br>").replace("ranks ", "ranks<br>") for c in columns]
    lines = [
        f"| program | idiom | changes | {' | '.join(heads)} |",
        "| --- | --- | --- |" + " --- |" * len(columns),
    ]
    family = ""
    notes: dict[str, int] = {}
    for name, row in found.items():
        program = known[name]
        if program.family != family:
            family = program.family
            lines.append(f"| **{family.replace('_', ' ')}** | | |" + " |" * len(columns))
        cells = [_short(row[c], notes) for c in columns]
        changes = f"{program.changes}{', `whole`' * program.needs_whole}"
        lines.append(f"| {name} | {program.idiom} | {changes} | {' | '.join(cells)} |")
    told = [f"{n}. {text}" for text, n in notes.items()]
    parts = [HEAD.format(counts=counts(found, known)).strip(), "\n".join(lines)]
    if told:
        parts.append("Refusals and failures:\n\n" + "\n".join(told))
    return "\n\n".join(parts) + "\n"


def _short(cell: Cell, notes: dict[str, int]) -> str:
    if cell.kind == "same":
        return cell.about
    if not cell.about:
        return str(cell)
    text = cell.about.replace("|", "\\|")
    number = notes.setdefault(text, len(notes) + 1)
    word = f"**{cell.kind}**" if cell.bad else cell.kind
    return f"{word} ({number})"
