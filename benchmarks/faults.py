"""Breaks runs at random for as long as it is told, and counts what became of the promises.

    python -m benchmarks.faults --minutes 60 --write

Faults, layouts and moments follow from seeds, one a run; a broken promise is printed with its seed, and
`--seed S --count 1` plays that run again. `--write` puts the table into benchmarks/faults.md.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from benchmarks.command_line import parser
from benchmarks.machine import processor
from faults.harness import LAYOUTS, BrokenPromise, play
from faults.injected import FAULTS

TABLE = Path(__file__).with_name("faults.md")


def one(seed: int) -> tuple[int, str, str, str]:
    """A run: its seed, layout, fault, and which promise it broke, if any."""
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        played = play(seed, directory / "run")
        return seed, played.layout, played.fault.name, ""
    except BrokenPromise as error:
        return seed, error.layout, error.fault, str(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Play runs; 1 where a promise was broken."""
    sizes = {"minutes": 60.0, "count": 10**9, "seed": 1000, "jobs": 2}
    options = parser(__doc__, **sizes, write=False).parse_args()
    kept: Counter[tuple[str, str]] = Counter()
    broken: list[tuple[int, str, str, str]] = []
    begin, seed = time.monotonic(), options.seed
    with ProcessPoolExecutor(options.jobs) as pool:
        while time.monotonic() - begin < 60 * options.minutes:
            left = min(4 * options.jobs, options.seed + options.count - seed)
            if left <= 0:
                break
            for found in pool.map(one, range(seed, seed + left)):
                kept[found[2], found[1]] += not found[3]
                if found[3]:
                    broken.append(found)
                    print(found[3], flush=True)
            seed += left
            print(f"{seed - options.seed} runs, {len(broken)} broke a promise", flush=True)
    minutes = (time.monotonic() - begin) / 60
    text = table(kept, broken, range(options.seed, seed), minutes)
    print(text)
    if options.write:
        TABLE.write_text(text)
    return bool(broken)


def table(
    kept: Counter[tuple[str, str]],
    broken: list[tuple[int, str, str, str]],
    seeds: range,
    minutes: float,
) -> str:
    """Runs that kept every promise, by fault and layout; `+k` is the number of those that did not."""
    lost = Counter((fault, layout) for _, layout, fault, _ in broken)
    lines = [
        "# Faults",
        "",
        "Runs that were broken at a random moment and kept every promise of [promises](../docs/promises.md), "
        "by fault and layout; `+k` more did not.",
        "",
        f"`python -m benchmarks.faults --seed {seeds.start} --count {len(seeds)}`, {minutes:.0f} minutes, "
        f"{processor()}: {len(seeds)} runs, {len(broken)} broke a promise.",
        "",
        "| fault | " + " | ".join(LAYOUTS) + " |",
        "| --- |" + " ---: |" * len(LAYOUTS),
    ]
    for fault in FAULTS.values():
        cells = [_cell(kept[fault.name, x], lost[fault.name, x], fault.fits(x)) for x in LAYOUTS]
        lines.append(f"| {fault.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(kept: int, lost: int, fits: bool) -> str:
    if not fits:
        return "n/a"
    return f"{kept} +{lost}" if lost else str(kept)


if __name__ == "__main__":
    sys.exit(main())
