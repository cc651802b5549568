"""Seconds and peak memory of fresh `tutti plan` processes for models of 8 to 671 billion parameters.

    python -m benchmarks.planning_memory [--models llama-8b ...]

The memory is the process's largest resident set, as the kernel reports it at its end. The plan must end well:
with a table, or with the error that no layout fits.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command_line import chosen, parser
from tutti.report.text_table import columns

SCRIPT = Path(__file__).parent / "planned_model.py"
MOST_GB = 4.0
_NOTHING_FITS = "no layout fits"


@dataclass(frozen=True)
class Planned:
    """A model, its devices, sequences of a step, and the words that every layout has."""

    model: str
    devices: int
    rows: int
    layout: str = ""


CASES = {
    c.model: c
    for c in (
        Planned("llama-8b", 64, 128),
        Planned("llama-70b", 1024, 2048),
        Planned("llama-405b", 16384, 2048),
        Planned("deepseek-v3", 2048, 15360, "precision=bf16"),
    )
}


@dataclass(frozen=True)
class PlanRun:
    """What a plan took: seconds, GB of memory at most, and its best layout, or the error."""

    seconds: float
    gigabytes: float
    best: str


def run_plan(case: Planned) -> PlanRun:
    """Plan in a process of its own, which is waited for alone: its memory is that of the largest child.

    Raises:
        SystemExit: the plan failed.
    """
    command = [sys.executable, "-m", "benchmarks.planning_memory", "child", case.model]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent.parent)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{case.model}: the plan failed\n{done.stdout}\n{done.stderr}")
    *_, nbytes, best = done.stdout.strip().splitlines()
    return PlanRun(seconds, int(nbytes) / 1e9, best)


def _child(case: Planned) -> None:
    """Run `tutti plan` as the only child of this process, then print its memory and its best layout."""
    words = ["plan", "--devices", f"{case.devices} x h100", "--global-batch", str(case.rows)]
    words += ["--layout", case.layout] if case.layout else []
    command = [sys.executable, "-m", "tutti", *words, str(SCRIPT), case.model]
    place = {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent.parent), *sys.path[1:]])}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    lines = (done.stdout + done.stderr).splitlines()
    best = next((x for x in lines if x.startswith("1 ")), "")
    error = next((x for x in lines if _NOTHING_FITS in x), "")
    if not best and not error:
        sys.exit(done.stdout + done.stderr)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    print(" ".join((best or error).split()))


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["child"]:
        _child(CASES[sys.argv[2]])
        return
    made = parser(__doc__, models=list(CASES))
    args = made.parse_args()
    rows = []
    for case in chosen(made, "models", args.models, CASES):
        run = run_plan(case)
        near = "" if run.gigabytes <= MOST_GB else f"more than {MOST_GB:g} GB"
        numbers = [f"{run.seconds:.0f}", f"{run.gigabytes:.2f}"]
        rows.append([case.model, str(case.devices), str(case.rows), *numbers, run.best, near])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(columns(["model", "H100", "sequences", "seconds", "GB", "best", ""], rows))


if __name__ == "__main__":
    main()
