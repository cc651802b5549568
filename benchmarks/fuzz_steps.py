"""Random small training steps, each equal to PyTorch's or refused by name, in every way to run it.

    python -m benchmarks.fuzz_steps --count 2000 --seed 0       # a summary; failing programs in runs/fuzz
    python -m benchmarks.fuzz_steps --seed 17 --count 1         # one seed, its source and its cells
    python runs/fuzz/program_17.py                              # a kept program, by itself

A seed is a program as Python source: a small network, one or two optimizers, and one to three habits of
real scripts (`benchmarks/fuzz`: numbers in closures, dicts, globals, attributes and groups that change in
the step or between the calls; buffers, averages, schedules, frozen layers, criteria, hooks ...). It runs
for four calls, in float64: as PyTorch runs it, on one device, by `verify` under two layouts, and on two
real ranks. What is returned, what is done in between, weights, slots and counters must be the same, or the
program refused with a `TuttiError`. A failing program is made smaller (`--shrink`) by leaving out habits
while it still fails.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.command_line import parser
from benchmarks.fuzz.check import ON_RANKS, VERIFIED, Cells, Work, checked
from benchmarks.fuzz.source import Drawn, draw, source

AT_ONCE = 20


def work_of(d: Drawn) -> Work:
    """The program of a seed, under layouts that the seed chooses, too."""
    chosen = random.Random(d.seed + 1)
    return Work(
        str(d.seed),
        source(d),
        ("data=2", chosen.choice(VERIFIED[1:])),
        (chosen.choice(ON_RANKS),),
    )


def failures(cells: Cells) -> list[str]:
    """The columns that are wrong, raw, or broken in PyTorch."""
    return [c for c, cell in cells.items() if cell.bad or cell.kind == "broken"]


def kinds(cells: Cells) -> list[str]:
    """Failures without their figures, to be counted."""
    found = []
    for column in failures(cells):
        cell = cells[column]
        about = cell.about if cell.kind in ("RAW", "broken") else ""
        found.append(
            f"{column.split()[0]} {cell.kind} {re.sub(r'[0-9.]+e?-?[0-9]*', '#', about)[:110]}"
        )
    return found


def shrunk(d: Drawn, columns: Sequence[str]) -> Drawn:
    """A smaller program that fails in one of these columns in the same kind of way."""
    ranks = any("ranks" in c for c in columns) and not any(c == "one" for c in columns)
    for smaller in d.smaller:
        (_, cells), *_ = checked([work_of(smaller)], ranks=ranks)
        if set(failures(cells)) & set(columns) and "eager" not in cells:
            return shrunk(smaller, columns)
    return d


def run(seeds: Sequence[int], jobs: int, *, ranks: bool) -> Iterator[tuple[int, Cells]]:
    """Seeds and their cells, as they come."""
    chunks = [seeds[i : i + AT_ONCE] for i in range(0, len(seeds), AT_ONCE)]

    def one(chunk: Sequence[int]) -> list[tuple[int, Cells]]:
        works = [work_of(draw(seed)) for seed in chunk]
        return [(int(w.key), cells) for w, cells in checked(works, ranks=ranks)]

    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(one, chunks):
            yield from found


def main() -> None:
    """Fuzz, show, keep what fails."""
    options = {"seed": 0, "count": 200, "jobs": 2, "no_ranks": False, "shrink": False}
    args = parser(__doc__, **options, out=Path("runs/fuzz")).parse_args()
    seeds, alone = range(args.seed, args.seed + args.count), args.count == 1
    if alone:
        print(source(draw(args.seed)))
    start, bad, tally = time.monotonic(), defaultdict(list), Counter()
    keep: Path = args.out
    for seed, cells in run(seeds, args.jobs, ranks=not args.no_ranks):
        tally.update(cell.kind for cell in cells.values())
        d = draw(seed)
        if columns := failures(cells):
            for kind in kinds(cells):
                bad[kind].append(seed)
            d = shrunk(d, columns) if args.shrink else d
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"program_{seed}.py").write_text(source(d))
        if columns or alone:
            shown = "".join(f"\n    {c:22} {x}" for c, x in cells.items() if x.bad or alone)
            print(f"seed {seed}: {d.name}{shown}", flush=True)
    print(f"\n{len(seeds)} programs in {time.monotonic() - start:.0f} s: {dict(tally)}")
    for kind, found in sorted(bad.items(), key=lambda one: -len(one[1])):
        print(f"{len(found):5}  {kind}\n       seeds {found[:12]}")
    print(f"{len({s for found in bad.values() for s in found})} programs fail; kept in {keep}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
