"""What ranks of their own do, for tests that kill or stop them: an action, and its argument.

Each says a line when it is ready and one with how it ended: "ok ...", or an error's type and text.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.comm.collectives.channels import make_channels
from tutti.comm.collectives.failure import naming
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.host.segment import SharedMemoryError
from tutti.errors import TuttiError
from tutti.launch.ranks import ensure_process_group

AXES = ("data",)
CHANNEL_ACTIONS = ("send", "recv")
Say = Callable[[str], None]


def many_chunks(num_ranks: int) -> torch.Tensor:
    """A payload that does not pass in one piece."""
    return torch.ones(num_ranks * 300_000)


def rounds(action: str, player: ProcessGroups) -> Callable[[], object]:
    """One round of an action, on this rank."""
    shared, num_ranks = player.groups.shared(AXES), dist.get_world_size()
    x = many_chunks(num_ranks)
    if action in CHANNEL_ACTIONS:
        # The last rank is the victim: in "send" it should have received, in "recv" it should have sent.
        edge = (0, num_ranks - 1) if action == "send" else (num_ranks - 1, 0)
        channels = make_channels([edge], player.groups)
        if edge[0] == dist.get_rank():
            return lambda: channels[edge].send(x)
        if edge[1] == dist.get_rank():
            return lambda: channels[edge].recv(x.shape, x.dtype)
        return lambda: time.sleep(0.05)
    assert shared is not None
    lying = shared.empty((num_ranks, 1000), torch.float32)

    def direct(move: Callable[..., object], *args: object) -> Callable[[], object]:
        def turn() -> None:
            with naming(action, AXES, x.nbytes, player.groups[AXES]):
                move(*args)

        return turn

    return {
        "all_reduce": lambda: player.all_reduce(x, AXES, "sum"),
        "all_gather": lambda: player.all_gather(x, AXES, 0, 1),
        "reduce_scatter": lambda: player.reduce_scatter(x, AXES, 0, 1, "sum"),
        "all_to_all": lambda: player.all_to_all(x, AXES, 0, 1, 0, 1),
        "broadcast": direct(shared.broadcast, x, 0),
        "barrier": direct(shared.barrier),
        "all_reduce_": direct(shared.all_reduce_, [lying], "sum"),
    }[action]


def repeat(say: Say, seconds: str, *, action: str) -> str:
    """Rounds for so long on rank 0; all leave together."""
    player = ProcessGroups(Groups({"data": dist.get_world_size()}, [AXES]))
    turn = rounds(action, player)
    say("ready")
    ends = time.monotonic() + float(seconds)
    while True:
        turn()
        if seconds == "inf":  # until somebody dies, in nothing but this action
            continue
        late = torch.tensor(float(time.monotonic() > ends))
        if player.all_reduce(late, AXES, "max"):
            return "ok"


def once(_: Say) -> str:
    """One all-reduce; says whether it went through shared memory, and what was warned of."""
    num_ranks = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = Groups({"data": 2, "tensor": num_ranks // 2}, [("data",), ("tensor",)])
        groups.add([("data", "tensor")])
    total = ProcessGroups(groups).all_reduce(
        torch.tensor(dist.get_rank()), ("data", "tensor"), "sum"
    )
    assert int(total) == num_ranks * (num_ranks - 1) // 2
    kinds = {groups.shared(axes) is not None for axes in (("data",), ("data", "tensor"))}
    lines = " | ".join(str(w.message) for w in caught)
    return f"ok shared={kinds} warnings={len(caught)} {lines}".rstrip()


def large_arena(_: Say, nbytes: str) -> str:
    """An arena that does not fit, then collectives as before."""
    num_ranks = dist.get_world_size()
    groups = Groups({"data": num_ranks}, [AXES])
    shared = groups.shared(AXES)
    assert shared is not None
    small = shared.empty((8,), torch.float32)
    try:
        shared.arena(int(nbytes))
    except SharedMemoryError as error:
        text = str(error)
    else:
        return "the arena was made"
    small.fill_(dist.get_rank())
    shared.all_reduce_([small], "sum")
    after = shared.empty((4,), torch.float32)
    after.fill_(dist.get_rank())
    total = shared.all_reduce(after, "sum")
    assert float(total[0]) == float(small[0]) == sum(range(num_ranks))
    return f"ok {text}"


def segments(say: Say) -> str:
    """Wait to be killed while holding shared memory; says what files it maps, with mode and links."""
    num_ranks = dist.get_world_size()
    groups = Groups({"data": num_ranks}, [AXES])
    shared = groups.shared(AXES)
    assert shared is not None
    shared.empty((2**24,), torch.uint8).fill_(1)
    ProcessGroups(groups).all_reduce(many_chunks(num_ranks), AXES, "sum")
    found = set()
    for link in Path("/proc/self/map_files").iterdir():
        if os.environ["TUTTI_SHARED_MEMORY"] in os.readlink(link):
            stat = link.stat()
            found.add(f"{stat.st_mode & 0o777:o}:{stat.st_nlink}")
    say(f"ready {' '.join(sorted(found))}")
    signal.pause()
    return "continued"


def main(pipe: Connection, environment: dict[str, str], action: str, *arguments: str) -> None:
    """Carry out the action as the rank that the environment says, and say so into the pipe."""
    os.environ |= environment
    try:
        torch.set_num_threads(1)
        ensure_process_group()
        later = os.environ.get("TIMEOUT_ONCE_STARTED")  # to start may take longer on a busy machine
        os.environ |= {"TUTTI_TIMEOUT": later} if later else {}
        named = {"once": once, "large_arena": large_arena, "segments": segments}
        act = named.get(action) or functools.partial(repeat, action=action)
        said = act(pipe.send, *arguments)
    except TuttiError as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " / ")
    except BaseException:
        said = traceback.format_exc()
    pipe.send(said)
    os._exit(0)  # a group whose rank was killed cannot be left in good order
