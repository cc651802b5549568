"""The user's line and the collective, read from a stack."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from tutti.comm.failure import Wait
from tutti.comm.process_groups import ProcessGroups
from tutti.runtime.whereabouts import LINES, collective, main_stack, traceback_stack, user_line

Stack = list[tuple[FrameType, int]]


class Player(ProcessGroups):
    """Waits in what `wait` says, without ranks."""

    def __init__(self) -> None:
        self.current = Wait("all_reduce", ("data",), 4200, 0.0)


def inside(frame: FrameType | None) -> Stack:
    stack = []
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    return stack


def test_the_line_is_that_of_the_innermost_frame_of_the_user() -> None:
    stack = main_stack(threading.get_ident())
    assert user_line(stack).partition(":")[0].endswith("test_whereabouts.py")
    assert collective(stack) == ""


def test_generated_code_names_the_line_it_stands_for() -> None:
    found: list[Stack] = []
    names = {
        LINES: {2: "train.py:12"},
        "look": lambda: found.append(inside(sys._getframe().f_back)),
    }
    exec(compile("\nlook()\n", "<tutti step>", "exec"), names)
    assert user_line(found[0]) == "train.py:12"


def test_a_player_on_the_stack_tells_its_collective() -> None:
    try:
        Player().all_reduce(None, ("data",), "sum")  # type: ignore[arg-type]
    except AttributeError as error:  # it has no groups
        stack = traceback_stack(error.__traceback__)
    assert collective(stack) == "all_reduce over data (4.2 kB)"
    assert user_line(stack).partition(":")[0].endswith("test_whereabouts.py")
