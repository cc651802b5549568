"""The user's line and the collective, read from a stack."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

from tutti.comm.collectives.failure import Wait
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.host.signals import LINE, PeerLate, Signals
from tutti.launch import whereabouts
from tutti.launch.gathering import Gathering
from tutti.launch.thread_stacks import Place, Stack, frames_of, stack_of, traceback_stack
from tutti.launch.whereabouts import Waiting, collective, lines, user_line, wait
from tutti.user_lines import LineTable


class Player(ProcessGroups):
    """Waits in what `wait` says, without ranks."""

    def __init__(self) -> None:
        self.current = Wait("all_reduce", ("data",), 4200, 0.0)


def inside(frame: FrameType | None) -> Stack:
    stack = Stack()
    while frame is not None:
        stack.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame))
        frame = frame.f_back
    return stack


def test_the_line_is_that_of_the_innermost_frame_of_the_user() -> None:
    stack = frames_of(threading.get_ident())
    assert user_line(stack).partition(":")[0].endswith("test_whereabouts.py")
    assert collective(stack) == ""


def test_generated_code_names_the_line_it_stands_for() -> None:
    found: list[Stack] = []
    table = LineTable("step", {2: "train.py:12"})
    ident = threading.get_ident()
    names = {"look": lambda: found.extend([frames_of(ident)[2:], stack_of(ident)[2:]])}
    exec(compile("\nlook()\n", table.file, "exec"), names)
    assert [user_line(stack) for stack in found] == 2 * ["train.py:12"]


def test_a_player_on_the_stack_tells_its_collective() -> None:
    try:
        Player().all_reduce(None, ("data",), "sum")  # type: ignore[arg-type]
    except AttributeError as error:  # it has no groups
        stack = traceback_stack(error.__traceback__)
    assert collective(stack) == "all_reduce over data (4.2 kB)"
    assert user_line(stack).partition(":")[0].endswith("test_whereabouts.py")


def test_a_wait_is_told_from_the_next_one() -> None:
    player, found = Player(), []
    for began in (1.0, 1.0, 2.0):
        player.current = Wait("all_reduce", ("data",), 4200, began)
        try:
            player.all_reduce(None, ("data",), "sum")  # type: ignore[arg-type]
        except AttributeError as error:
            found.append(wait(traceback_stack(error.__traceback__)))
    first, again, later = found
    assert first is not None and again is not None and later is not None
    assert first.what == "all_reduce over data (4.2 kB)" and first.ranks == ()
    assert first.same(again) and not first.same(later)
    assert wait(frames_of(threading.get_ident())) is None


def late_in(memory: torch.Tensor) -> tuple[int, ...]:
    """The ranks for which a group of three waits, of which rank 7 has come further."""
    signals = Signals(memory, (5, 6, 7), 0, [os.getpid()] * 3, 0.1)
    try:
        signals.sync()
    except PeerLate as error:
        stack = traceback_stack(error.__traceback__)
        return whereabouts._missing(stack)
    raise AssertionError("it has not waited")


def test_the_ranks_that_have_not_come_are_told_from_the_counters() -> None:
    memory = torch.zeros(3 * LINE, dtype=torch.uint8)
    assert late_in(memory) == (6, 7)
    memory.view(torch.int32)[2 * LINE // 4] = 1
    assert late_in(memory) == (6,)


def inside_torch(name: str) -> Stack:
    """The stack within a function of torch.distributed."""
    names = {"inside": inside, "sys": sys}
    code = f"def {name}():\n    return inside(sys._getframe())\n"
    exec(compile(code, "torch/distributed/distributed_c10d.py", "exec"), names)
    return names[name]()  # type: ignore[operator, no-any-return]


def test_a_plain_collective_is_a_wait_while_nothing_is_computed() -> None:
    stack = inside_torch("barrier")
    first, same, later = (wait(stack, cpu) for cpu in (1.0, 1.0, 1.1))
    assert first is not None and same is not None and later is not None
    assert first.what == collective(stack) == "barrier"
    assert first.same(same) and not first.same(later)


def test_a_rank_that_waits_for_others_at_the_start_tells_which(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    store.set("here/1", "")
    found: list[Waiting | None] = []

    class Watched(Gathering):
        def _has_ended(self, rank: int) -> bool:
            found.append(wait(inside(sys._getframe())))
            for late in (0, 2):
                store.set(f"here/{late}", "")
            return False

    Watched(store, tmp_path, 1, first=0, size=3).wait()
    waiting = found[0]
    assert waiting is not None
    assert (waiting.what, waiting.ranks) == ("init_process_group", (0, 2))


@pytest.mark.parametrize("name", ["get_rank", "get_world_size", "is_initialized", "WORLD"])
def test_a_call_that_no_other_rank_answers_is_no_wait(name: str) -> None:
    stack = inside_torch(name)
    assert wait(stack) is None
    assert collective(stack) == ""


def test_lines_are_those_of_the_script_outermost_first() -> None:
    def inner() -> Stack:
        return inside(sys._getframe())

    found = lines(inner(), most=4)
    assert found[-1].endswith("in inner") and found[-2].endswith("outermost_first")
    assert len(found) == 4


READS = """
import gc, sys, threading, time
from tutti.launch.thread_stacks import frames_of
from tutti.launch.whereabouts import collective, user_line

class Garbage:
    def __init__(self): self.itself = self
    def __del__(self):
        for i in range(30): step(i)

def step(i): return i
def deep(n): return deep(n - 1) if n else [Garbage() for _ in range(3)]

ended = threading.Event()

def watch():
    while not ended.is_set():
        stack = frames_of(threading.main_thread().ident)
        collective(stack), user_line(stack)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
sys.setswitchinterval(1e-5)
gc.set_threshold(50)
until = time.monotonic() + 3
while time.monotonic() < until:
    deep(5), deep(30), deep(80)
ended.set()
watcher.join()  # while it reads, nothing is collected
print("alive", gc.isenabled())
"""


def test_reading_a_busy_thread_does_not_end_the_process() -> None:
    """Finalizers of a collection in the reading thread let the other one leave the frame that is read."""
    made = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, timeout=120
    )
    assert (made.returncode, made.stdout, made.stderr) == (0, "alive True\n", "")
