"""Whether a server of ten thousand pushes is as fast as one of a hundred, and holds as little.

    python -m benchmarks.server_growth --pushes 10000

One server that keeps records, in a process of its own, and one worker that pulls and pushes a small model,
`async`. Prints the pushes a second of each window, and the server's open files, mappings of records and
resident memory at its end.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.command_line import parser
from benchmarks.soak_servers import Run, free_ports

WARM_PUSHES = 50


@dataclass(frozen=True)
class Window:
    """So many pushes at this rate; what the server held at the end of it."""

    pushes: int
    per_second: float
    descriptors: int
    mappings: int
    resident_mib: float


def serve(run: Run, ready: Connection) -> None:
    """The server process."""
    torch.set_num_threads(1)
    service = run.service(0)
    ready.send(os.getpid())
    service.run()


def held(pid: int, directory: str) -> tuple[int, int, float]:
    """Descriptors, mappings of files in `directory`, and MiB of resident memory of a process."""
    process = Path("/proc") / str(pid)
    maps = (process / "maps").read_text().splitlines()
    pages = int((process / "statm").read_text().split()[1])
    mapped = sum(directory in line for line in maps)
    return len(list((process / "fd").iterdir())), mapped, pages * os.sysconf("SC_PAGESIZE") / 2**20


def windows(run: Run, pid: int, count: int, size: int) -> Iterator[Window]:
    """`count` pushes, reported `size` at a time."""
    weights = {n: slots["weight"] for n, slots in run.updater().state().items()}
    made = {n: torch.ones_like(x) for n, x in weights.items()}
    with run.client(0) as one:
        one.join()
        for _ in range(WARM_PUSHES):
            one.pull(weights)
            one.push(made, {})
        for first in range(0, count, size):
            begin = time.perf_counter()
            for _ in range(size):
                one.pull(weights)
                one.push(made, {})
            rate = size / (time.perf_counter() - begin)
            yield Window(first + size, rate, *held(pid, run.directory))
        one.leave()


def main() -> None:
    """The command."""
    options = parser(__doc__, pushes=10_000, window=500, size=2**14).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        run = Run(directory, free_ports(1), "async", 1, options.size, log_nbytes=2**30)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(run, there), daemon=True)
        process.start()
        pid, found = here.recv(), []
        for window in windows(run, pid, options.pushes, options.window):
            found.append(window.per_second)
            print(
                f"{window.pushes:7,} pushes  {window.per_second:7.1f}/s  {window.descriptors:5} descriptors  "
                f"{window.mappings:5} mappings  {window.resident_mib:7.1f} MiB",
                flush=True,
            )
        process.terminate()
        process.join()
    quarter = max(1, len(found) // 4)
    early, late = statistics.median(found[:quarter]), statistics.median(found[-quarter:])
    print(f"last quarter / first quarter: {late / early:.2f}")


if __name__ == "__main__":
    main()
