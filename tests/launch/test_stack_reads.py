"""No thread of tutti reads the stack of a thread that makes a trace."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.launch.waits import WaitWatch
from tutti.stack_reads import reading, unread
from tutti.torch_private import tracing


def elsewhere(function: Callable[[], object]) -> None:
    """Run `function` in another thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_watch_reads_no_stack_during_a_trace_and_answers(tmp_path: Path) -> None:
    reads = list[int]()

    def stack() -> list[object]:
        reads.append(1)
        return []

    watch = WaitWatch(0, tmp_path, stack, size=2)  # type: ignore[arg-type]

    (tmp_path / "rank0.ask.1").touch()
    with unread():
        elsewhere(watch.look)
    assert reads == []
    assert json.loads((tmp_path / "rank0.answer.1").read_text())["why"] == "it captures its step"
    elsewhere(watch.look)
    assert reads == [1]


@pytest.mark.parametrize("traced", ["tutti.capture.step", "tutti.capture.second_trace.functional"])
def test_both_traces_of_a_step_go_unread(monkeypatch: pytest.MonkeyPatch, traced: str) -> None:
    free = list[bool]()

    def look() -> None:
        with reading() as is_free:
            free.append(is_free)

    def trace(*given: Any) -> Any:
        elsewhere(look)
        return tracing.trace(*given)

    monkeypatch.setattr(f"{traced}.trace", trace)
    tutti.distribute(lambda model, x: model(x).sum(), nn.Linear(2, 2))(torch.ones(2, 2))
    elsewhere(look)
    assert free == [False, True]


def test_the_frames_of_a_read_are_dropped_before_a_trace_begins(tmp_path: Path) -> None:
    read, main = threading.Event(), threading.get_ident()
    counts = list[int]()

    def stack() -> list[object]:
        found = [(sys._current_frames()[main], 1)]
        read.set()
        return found

    watch = WaitWatch(0, tmp_path, stack, size=2)  # type: ignore[arg-type]
    tensor = torch.ones(2)

    def held() -> None:
        own = tensor
        thread.start()
        read.wait()
        del own

    thread = threading.Thread(target=watch.look)
    before = sys.getrefcount(tensor)
    held()
    with unread():
        counts.append(sys.getrefcount(tensor))
    thread.join()
    assert counts == [before]


def test_a_forked_child_traces_while_a_thread_of_its_parent_reads() -> None:
    inside, over = threading.Event(), threading.Event()

    def read() -> None:
        with reading():
            inside.set()
            over.wait()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        with unread():
            os._exit(0)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
