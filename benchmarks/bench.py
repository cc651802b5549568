"""tutti next to its peers, side by side.

    make bench                                         # everything, under 20 minutes
    make bench ARGS="--quick"                          # one small model, a minute or two
    python -m benchmarks.bench --models gpt-51M --ways one ddp "tutti data=2"

The result is printed and kept in benchmarks/results (that of --quick in runs/bench).
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import date
from functools import reduce
from pathlib import Path

from rich.console import Console

from benchmarks import machine, report
from benchmarks.command_line import chosen, parser
from benchmarks.contenders.contender import Way
from benchmarks.harness import Entry, Pace, Tell, race
from benchmarks.models import CASES, Case, fields_of, num_parameters
from benchmarks.moves import measure_moves
from benchmarks.python_share import python_share
from benchmarks.result import Race, Result
from benchmarks.ways import WAYS

ROOT = Path(__file__).parent.parent
WIDTH = 120
QUICK_MODELS, QUICK_PACE = ["gpt-3.7M"], Pace(num_rounds=3, turn_seconds=0.2, num_warm=2)


def main() -> None:
    """Measure, print, keep."""
    command = parser(
        __doc__,
        **{
            "models": list(CASES),
            "ways": list(WAYS),
            "rounds": 7,
            "turn_seconds": 0.7,
            "builds": 1,
        },
        **{"quick": False, "no_moves": False, "out": None},
    )
    args = command.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # a narrow table would lose columns
    pace = Pace(num_rounds=args.rounds, turn_seconds=args.turn_seconds, num_builds=args.builds)
    if args.quick:
        pace = QUICK_PACE
        args.models = QUICK_MODELS if args.models == list(CASES) else args.models
    cases = chosen(command, "models", args.models, CASES)
    contenders = chosen(command, "ways", args.ways, WAYS)
    result = Result(date.today().isoformat(), machine.describe(), asdict(pace))
    kept = args.out or ROOT / ("runs/bench" if args.quick else "benchmarks/results")
    name = f"{result.date}-{machine.slug(result.machine)}"
    page = kept / f"{name}.md"
    _warn_if_busy(console)
    with console.status("") as status:
        if not args.no_moves:
            result.collectives = measure_moves(pace.num_rounds, status.update)
        for case in cases:
            result.races.append(run(case, contenders, pace, status.update))
            report.show([report.race_table(result.races[-1])], console)
            page = report.write(result, kept, name)  # a run that is stopped leaves what it has
    report.show(report.findings(result), console)
    console.print(f"kept in {page}, with .json and .png")


def run(case: Case, ways: list[Way], pace: Pace, tell: Tell) -> Race:
    """All ways that apply to a model."""
    able = [way for way in ways if way.applies_to(case)]

    def told(text: str) -> None:
        tell(f"{case.name}: {text}")

    builds = [
        race(case, able, pace=pace, tell=told, extra=python_share) for _ in range(pace.num_builds)
    ]
    entries = [reduce(Entry.with_more, same) for same in zip(*builds, strict=True)]
    return Race(case.name, case.unit, num_parameters(case.model()), fields_of(case), entries)


def _warn_if_busy(console: Console) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.25 * cores:
        console.print(f"the machine is busy (load {load:.1f} on {cores} cores): ratios are hints")


if __name__ == "__main__":
    main()
