"""Ranks of their own for tests that kill or stop them: `lone_ranks.py ACTION [ARGUMENT]`.

Each prints a line when it is ready and one with how it ended: "ok ...", or an error's type and text.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tutti.comm.channels import make_channels
from tutti.comm.failure import naming
from tutti.comm.groups import Groups
from tutti.comm.process_groups import ProcessGroups
from tutti.comm.segment import SharedMemoryError
from tutti.errors import TuttiError
from tutti.runtime.ranks import ensure_process_group

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VICTIM = NUM_RANKS - 1
AXES = ("data",)
X = torch.ones(NUM_RANKS * 300_000)  # many chunks
CHANNEL_ACTIONS = ("send", "recv")


def rounds(action: str, player: ProcessGroups) -> Callable[[], object]:
    """One round of an action, on this rank."""
    shared = player.groups.shared(AXES)
    if action in CHANNEL_ACTIONS:
        # In "send" the victim should have received, in "recv" it should have sent.
        edge = (0, VICTIM) if action == "send" else (VICTIM, 0)
        channels = make_channels([edge], player.groups)
        if edge[0] == RANK:
            return lambda: channels[edge].send(X)
        if edge[1] == RANK:
            return lambda: channels[edge].recv(X.shape, X.dtype)
        return lambda: time.sleep(0.05)
    assert shared is not None
    lying = shared.empty((NUM_RANKS, 1000), torch.float32)

    def direct(move: Callable[..., object], *args: object) -> Callable[[], object]:
        def turn() -> None:
            with naming(action, AXES, X.nbytes, player.groups[AXES]):
                move(*args)

        return turn

    return {
        "all_reduce": lambda: player.all_reduce(X, AXES, "sum"),
        "all_gather": lambda: player.all_gather(X, AXES, 0, 1),
        "reduce_scatter": lambda: player.reduce_scatter(X, AXES, 0, 1, "sum"),
        "all_to_all": lambda: player.all_to_all(X, AXES, 0, 1, 0, 1),
        "broadcast": direct(shared.broadcast, X, 0),
        "barrier": direct(shared.barrier),
        "all_reduce_": direct(shared.all_reduce_, [lying], "sum"),
    }[action]


def repeat(action: str, seconds: str) -> str:
    """Rounds for so long on rank 0; all leave together."""
    player = ProcessGroups(Groups({"data": NUM_RANKS}, [AXES]))
    turn = rounds(action, player)
    print("ready", flush=True)
    ends = time.monotonic() + float(seconds)
    while True:
        turn()
        if seconds == "inf":  # until somebody dies, in nothing but this action
            continue
        late = torch.tensor(float(time.monotonic() > ends))
        if player.all_reduce(late, AXES, "max"):
            return "ok"


def once(*_: str) -> str:
    """One all-reduce; says whether it went through shared memory, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = Groups({"data": 2, "tensor": NUM_RANKS // 2}, [("data",), ("tensor",)])
        groups.add([("data", "tensor")])
    total = ProcessGroups(groups).all_reduce(torch.tensor(RANK), ("data", "tensor"), "sum")
    assert int(total) == NUM_RANKS * (NUM_RANKS - 1) // 2
    kinds = {groups.shared(axes) is not None for axes in (("data",), ("data", "tensor"))}
    lines = " | ".join(str(w.message) for w in caught)
    return f"ok shared={kinds} warnings={len(caught)} {lines}"


def large_arena(nbytes: str) -> str:
    """An arena that does not fit, then collectives as before."""
    groups = Groups({"data": NUM_RANKS}, [AXES])
    shared = groups.shared(AXES)
    assert shared is not None
    small = shared.empty((8,), torch.float32)
    try:
        shared.arena(int(nbytes))
    except SharedMemoryError as error:
        text = str(error)
    else:
        return "the arena was made"
    small.fill_(RANK)
    shared.all_reduce_([small], "sum")
    after = shared.empty((4,), torch.float32)
    after.fill_(RANK)
    total = shared.all_reduce(after, "sum")
    assert float(total[0]) == float(small[0]) == sum(range(NUM_RANKS))
    return f"ok {text}"


def segments(*_: str) -> str:
    """Wait to be killed while holding shared memory; says what files it maps, with mode and links."""
    groups = Groups({"data": NUM_RANKS}, [AXES])
    shared = groups.shared(AXES)
    assert shared is not None
    shared.empty((2**24,), torch.uint8).fill_(1)
    ProcessGroups(groups).all_reduce(X, AXES, "sum")
    found = set()
    for link in Path("/proc/self/map_files").iterdir():
        if "/dev/shm" in os.readlink(link):
            stat = link.stat()
            found.add(f"{stat.st_mode & 0o777:o}:{stat.st_nlink}")
    print(f"ready {' '.join(sorted(found))}", flush=True)
    signal.pause()
    return "continued"


def main() -> None:
    """Carry out the action of the command line."""
    torch.set_num_threads(1)
    ensure_process_group()
    later = os.environ.get("TIMEOUT_ONCE_STARTED")  # to start may take longer on a busy machine
    os.environ |= {"TUTTI_TIMEOUT": later} if later else {}
    action, *arguments = sys.argv[1:]
    named = {"once": once, "large_arena": large_arena, "segments": segments}
    try:
        said = named[action](*arguments) if action in named else repeat(action, arguments[0])
    except TuttiError as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " / ")
    print(said, flush=True)
    os._exit(0)  # a group whose rank was killed cannot be left in good order


main()
