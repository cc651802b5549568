"""Stacks of a thread that goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tutti.launch.thread_stacks import Place, Stack, frames_of, stack_of, traceback_stack
from tutti.launch.waits import WaitWatch

CALL = 1 + next(
    i for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("# raises")
)
_FUNCTORCH = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode  # type: ignore[attr-defined]


def as_text(stack: Stack) -> list[tuple[str, int, str]]:
    return [(place.file, place.line, place.function) for place in stack]


def seen(read: Callable[[int], Stack]) -> Stack:
    """What another thread reads of a thread that stands in code with letters beyond ASCII."""
    inside, over, found = threading.Event(), threading.Event(), list[Stack]()
    names: dict[str, Any] = {"inside": inside, "over": over}
    code = "def größe():\n    inside.set()\n    over.wait()\n"
    exec(compile(code, "/tmp/modèle 模.py", "exec"), names)
    thread = threading.Thread(target=names["größe"])
    thread.start()
    inside.wait()
    try:
        found.append(read(thread.ident or 0))
    finally:
        over.set()
        thread.join()
    return found[0]


def test_the_text_is_that_of_the_frames() -> None:
    text, frames = seen(stack_of), seen(frames_of)
    (at,) = [i for i, place in enumerate(text) if place.function == "größe"]
    assert text[at] == Place("/tmp/modèle 模.py", 3, "größe")
    assert as_text(text)[at:] == as_text(frames)[-len(text[at:]) :]
    assert all(place.frame is None for place in text)
    assert all(isinstance(place.frame, FrameType) for place in frames)
    (frame,) = [place for place in frames if place.function == "größe"]
    assert "over" in frame.frame.f_globals and frame.variables() == {}  # type: ignore[union-attr]


def test_a_thread_that_is_over_has_no_stack() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stack_of(thread.ident or 0) == frames_of(thread.ident or 0) == []


_NATIVE_THREADS = """
import ctypes, threading, time
from tutti.launch.thread_stacks import stack_of

library = ctypes.CDLL(None)
enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
until = time.monotonic() + 3

def start_threads():
    made = ctypes.c_ulong()
    while time.monotonic() < until:
        library.pthread_create(ctypes.byref(made), None, enter, None)
        library.pthread_join(made, None)

others = [threading.Thread(target=start_threads) for _ in range(2)]
for thread in others:
    thread.start()
while time.monotonic() < until:
    assert [place.function for place in stack_of(threading.main_thread().ident)] == ["stack_of", "<module>"]
for thread in others:
    thread.join()
"""


def test_native_threads_enter_python_meanwhile() -> None:
    """Those of autograd or a communication library add themselves to Python's threads at any time."""
    ended = subprocess.run([sys.executable, "-c", _NATIVE_THREADS], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_stack_without_a_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has none left still says where it was when SIGTERM ended it."""

    def none_left(*_: object) -> int:
        raise OSError("too many open files")

    for name in ("memfd_create", "open"):
        monkeypatch.setattr(os, name, none_left)
    assert stack_of(threading.get_ident())


def test_a_stack_is_whole() -> None:
    """A line of the user lies below any number of a library's."""

    def below(depth: int) -> Stack:
        return below(depth - 1) if depth else stack_of(threading.get_ident())

    functions = [place.function for place in below(300)]
    assert functions.count("below") == 301 and "test_a_stack_is_whole" in functions


def test_a_traceback_is_a_stack() -> None:
    try:
        int("x")  # raises
    except ValueError as error:
        (place,) = traceback_stack(error.__traceback__)
    assert place.function == "test_a_traceback_is_a_stack"
    assert place.frame is sys._getframe() and place.line == CALL


@pytest.fixture
def _quick_switches() -> Any:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def printed_while(look: Callable[[], object]) -> bool:
    """Whether functorch is on in a thread that has printed tensors, while another one looks at its stack."""
    over, x = threading.Event(), torch.ones(1)

    def keep_looking() -> None:
        while not over.is_set():
            look()

    watch, found = threading.Thread(target=keep_looking), list[bool]()

    def print_tensors() -> None:
        for _ in range(2000):
            repr(x)
        found.append(not torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTORCH))

    watch.start()
    thread = threading.Thread(target=print_tensors)
    thread.start()
    thread.join()
    over.set()
    watch.join()
    return found[0]


@pytest.mark.usefixtures("_quick_switches")
def test_a_watched_rank_prints_tensors(tmp_path: Path) -> None:
    """While it prints one, functorch is off until a variable dies, which a frame would keep."""
    threads = lambda: [t.ident for t in threading.enumerate() if t.name.endswith("(print_tensors)")]  # noqa: E731
    stack = lambda: [place for ident in threads() for place in stack_of(ident or 0)]  # noqa: E731
    assert printed_while(WaitWatch(0, tmp_path, stack).look)
