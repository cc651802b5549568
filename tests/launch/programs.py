"""A script for the launcher's tests: steps of one all-reduce, with one thing that goes wrong.

programs.py [nothing | kill | raise | exit | stuck | sleep | fork | save | library | never | nobody]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from processes import wait_until_asleep

from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.errors import ShardingError
from tutti.launch.ranks import ensure_process_group

AXES = ("data",)
BAD_STEP = 3
wrong = sys.argv[1] if len(sys.argv) > 1 else "nothing"
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
stop: list[int] = []


def note_pid(pid: int, name: str) -> None:
    if len(sys.argv) > 2:
        (Path(sys.argv[2]) / f"{name}.pid").write_text(str(pid))


def noted_pid(name: str) -> int:
    return int((Path(sys.argv[2]) / f"{name}.pid").read_text())


def go_wrong() -> None:
    if wrong == "kill":
        wait_until_asleep(
            [noted_pid(f"rank{other}") for other in range(num_ranks) if other != rank]
        )
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "raise":
        raise ValueError("a batch of the wrong kind")
    if wrong == "library":
        raise ShardingError("cannot split", why="a test", fix="nothing")
    if wrong == "exit":
        sys.exit(0)
    if wrong == "stuck":
        time.sleep(1000)  # the line where rank 1 is


def start() -> ProcessGroups:
    note_pid(os.getpid(), f"rank{rank}")
    if wrong == "fork" and os.fork() == 0:
        note_pid(os.getpid(), f"child{rank}")
        time.sleep(1000)
    if wrong == "nobody" or (wrong == "never" and rank == 1):
        sys.exit(0)
    if wrong == "save":
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    ensure_process_group()
    later = os.environ.get("TIMEOUT_ONCE_STARTED")  # to start may take longer on a busy machine
    os.environ |= {"TUTTI_TIMEOUT": later} if later else {}
    return ProcessGroups(Groups({"data": num_ranks}, [AXES]))


def main() -> None:
    player = start()
    endless = wrong in ("save", "fork", "sleep", "exit", "kill", "raise", "library", "stuck")
    step, total = 0, 0.0
    while endless or step < 5:
        if step == BAD_STEP:
            print(f"rank {rank} at step {step}", flush=True)
            if rank == 1:
                go_wrong()
        total = player.all_reduce(torch.tensor([1.0, len(stop)]), AXES, "sum")  # here ranks wait
        if total[1]:
            break
        step += 1
        time.sleep(0.01)
    if wrong == "save":
        time.sleep(1)
        dist.barrier()
        print(f"rank {rank} saved", flush=True)
    print(f"rank {rank} done: {total[0]:g}")
    print(f"rank {rank} says so", file=sys.stderr)


main()
