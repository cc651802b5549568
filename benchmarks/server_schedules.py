"""Random schedules of workers and servers in a simulated network: so many, from one seed each.

    python -m benchmarks.server_schedules --count 1000000 --jobs 2

A seed draws the consistency, how many workers and servers, what the network loses, doubles, delays and cuts
off, and who is killed when. After each run the records are replayed and checked, as
`tests/server/protocol/test_simulated.py` does. Prints how far it is, and each seed that fails with its error;
`--seed SEED --count 1` plays it again.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.command_line import parser
from server.protocol.test_simulated import ALL, check
from server.protocol.updaters import ClippedAdam, Sgd
from server.protocol.world import Faults, World
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.update import ServedVariable

CHUNK = 500
_MOST_TOLD = 20


class SmallSgd(Sgd):
    """On two numbers."""

    def __init__(self) -> None:
        super().__init__(variables=_small())


class SmallAdam(ClippedAdam):
    """On two numbers, with slots and a norm over both."""

    def __init__(self) -> None:
        slots: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "first": ((1,), torch.float64),
            "second": ((1,), torch.float64),
            "step": ((), torch.float64),
        }
        super().__init__(
            variables=tuple(
                ServedVariable(name=v.name, shape=v.shape, dtype=v.dtype, slots=slots)
                for v in _small()
            )
        )


def _small() -> tuple[ServedVariable, ...]:
    return tuple(ServedVariable(name=n, shape=(1,), dtype=torch.float64) for n in ("a", "b"))


def drawn(seed: int) -> World:
    """The world of a seed."""
    chance = random.Random(seed)
    workers, servers = chance.choice((1, 2, 2, 3)), chance.choice((1, 1, 2))
    cuts = [
        (
            begin,
            begin + chance.uniform(0.0, 8.0),
            chance.randrange(workers),
            chance.randrange(servers),
        )
        for begin in (chance.uniform(0.0, 5.0) for _ in range(chance.choice((0, 0, 1, 2))))
    ]
    killed = chance.choice(("", "", "server", "worker", "both"))
    faults = Faults(
        drop=chance.choice((0.0, 0.1, 0.3)),
        duplicate=chance.choice((0.0, 0.3)),
        delay=chance.choice((0.0, 0.1, 1.0)),
        cuts=tuple(cuts),
        slow=chance.choice(((), (0,))),
        kill_server=(
            chance.randrange(servers),
            chance.randrange(16),
            chance.choice(("before", "after")),
        )
        if killed in ("server", "both")
        else None,
        kill_worker=(chance.randrange(workers), chance.randrange(12), chance.random() < 0.7)
        if killed in ("worker", "both")
        else None,
    )
    return World(
        chance.choice((SmallSgd, SmallSgd, SmallAdam))(),
        parse(chance.choice(ALL)),
        seed=seed,
        faults=faults,
        num_workers=workers,
        num_servers=servers,
        steps=2,
    )


def play(seed: int) -> str:
    """One schedule: what is wrong with it, "" if nothing."""
    try:
        world = drawn(seed)
        world.run()
        check(world)
    except Exception:
        return traceback.format_exc()
    return ""


def play_some(seeds: range) -> list[tuple[int, str]]:
    """The seeds that fail, each with its error."""
    torch.set_num_threads(1)
    return [(seed, error) for seed in seeds if (error := play(seed))]


def chunks(first: int, count: int) -> Iterator[range]:
    """The seeds, some at a time."""
    for begin in range(first, first + count, CHUNK):
        yield range(begin, min(begin + CHUNK, first + count))


def main() -> None:
    """The command."""
    options = parser(__doc__, count=1_000_000, seed=0, jobs=1).parse_args()
    begin, done, failed = time.monotonic(), 0, 0
    context = multiprocessing.get_context("forkserver")
    parts = list(chunks(options.seed, options.count))
    with context.Pool(options.jobs) as pool:
        for number, bad in enumerate(pool.imap(play_some, parts)):
            done += len(parts[number])
            failed += len(bad)
            for seed, error in bad[:_MOST_TOLD]:
                print(f"seed {seed}\n{error}", flush=True)
            if number % 20 == 19 or done == options.count:
                seconds = time.monotonic() - begin
                print(
                    f"{done:,} schedules, {failed} failed, {seconds:.0f} s, {done / seconds:.0f}/s",
                    flush=True,
                )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
