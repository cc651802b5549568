"""Collectives between two processes: shared memory against Gloo, side by side.

    python -m benchmarks.collectives

One thread each; the ways alternate, and their medians are compared. `plain` takes a tensor of the
process's own and returns a new one; `arena` has its tensors in shared memory already, as a step that runs
many times does. A new result of 100 MB is made of fresh pages at every call: on a virtual machine that
costs more than the collective.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.command_line import parser
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.transport import Distributed, Transport
from tutti.comm.host.shared_memory import SharedGroup
from tutti.launch.ranks import ensure_process_group

NUM_RANKS = 2
AXES = ("data",)
DEVICE = torch.device("cpu")
SIZES = (4_000, 256_000, 4_000_000, 100_000_000)  # bytes of an all-reduce
WHOLE_NBYTES = 200_000_000  # of an all-gather's result and a reduce-scatter's input
Ways = dict[str, Callable[[], object]]


def all_reduces(gloo: Transport, shared: SharedGroup, nbytes: int) -> Ways:
    """Three ways to sum a float tensor."""
    x, lying = torch.randn(nbytes // 4), shared.empty((nbytes // 4,), torch.float32)
    lying.copy_(x)
    return {
        "gloo": lambda: gloo.all_reduce(x, "sum"),
        "plain": lambda: shared.all_reduce(x, "sum"),
        "arena": lambda: shared.all_reduce_(
            [lying], "max"
        ),  # costs what a sum does, and stays finite
    }


def all_gathers(gloo: Transport, shared: SharedGroup, nbytes: int) -> Ways:
    """Three ways to gather a part of each rank."""
    lying = shared.empty((NUM_RANKS, nbytes // 4 // NUM_RANKS), torch.float32)
    x = torch.randn(lying.shape[1])
    lying[shared.position].copy_(x)
    return {
        "gloo": lambda: gloo.all_gather(x),
        "plain": lambda: shared.all_gather(x),
        "arena": lambda: shared.all_gather_([lying]),
    }


def reduce_scatters(gloo: Transport, shared: SharedGroup, nbytes: int) -> Ways:
    """Three ways to sum and keep a part."""
    lying = shared.empty((NUM_RANKS, nbytes // 4 // NUM_RANKS), torch.float32)
    x = torch.randn(lying.shape)
    lying.copy_(x)
    everywhere = shared.everywhere(lying)
    assert everywhere is not None
    own = [rows[shared.position] for rows in everywhere]  # this rank's part, as each has written it
    return {
        "gloo": lambda: gloo.reduce_scatter(x, "sum"),
        "plain": lambda: shared.reduce_scatter(x, "sum"),
        "arena": lambda: shared.reduce_([own], "sum"),
    }


def medians(
    ways: Mapping[str, Callable[[], object]], num_rounds: int, meet: Callable[[], None]
) -> dict[str, float]:
    """Median seconds of each, measured in turn after a round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 1):
        for name, way in ways.items():
            meet()
            begin = time.perf_counter()
            result = way()
            seconds[name].append(time.perf_counter() - begin)
            del result
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def measure() -> None:
    """On each rank; the first prints a line per collective and size."""
    torch.set_num_threads(1)
    ensure_process_group()
    groups = Groups({"data": NUM_RANKS}, [AXES])
    shared = groups.shared(AXES)
    assert shared is not None, "no shared memory here"
    gloo = Distributed(groups[AXES])
    table = [("all-reduce", all_reduces, nbytes) for nbytes in SIZES]
    table += [("all-gather", all_gathers, WHOLE_NBYTES)]
    table += [("reduce-scatter", reduce_scatters, WHOLE_NBYTES)]
    for name, make, nbytes in table:
        num_rounds = max(7, min(500, 2**29 // nbytes))
        gloo_s, plain_s, arena_s = medians(
            make(gloo, shared, nbytes), num_rounds, shared.barrier
        ).values()
        if groups.rank == 0:
            print(
                f"{name:<15}{nbytes / 1e3:>10.0f}{gloo_s * 1e3:>10.3f}{plain_s * 1e3:>10.3f}"
                f"{plain_s / gloo_s:>7.3f}{arena_s * 1e3:>10.3f}{arena_s / gloo_s:>7.3f}",
                flush=True,
            )


def main() -> None:
    """Start the ranks."""
    parser(__doc__).parse_args()
    print(f"{'collective':<15}{'kB':>10}{'gloo ms':>10}{'plain ms':>10}{'ratio':>7}", end="")
    print(f"{'arena ms':>10}{'ratio':>7}", flush=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(NUM_RANKS):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
            os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            os.environ["TUTTI_RUN_DIR"] = directory
            ranks.append(context.Process(target=measure))
            ranks[-1].start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
