"""One rank of `tutti run`: runs the user's script and records its end.

The launcher calls `python -m tutti.launch.worker script.py args...`, or `... -m module args...`. The script
sees the same environment as under `python script.py args...`, or `python -m module args...`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback of what follows

from tutti.environment import RUN_DIR
from tutti.errors import CommError, TuttiError
from tutti.launch.good_end import forget_good_end
from tutti.launch.records import (
    Exit,
    Failure,
    Record,
    StoppedAt,
    crash_file,
    note_pid,
    note_script,
    write_record,
)
from tutti.launch.run_dir import without_room
from tutti.launch.script import Script, error_text, exit_code
from tutti.launch.stand_in import die_with_parent, stand_in
from tutti.launch.thread_stacks import Stack, frames_of, stack_of, traceback_stack
from tutti.launch.waits import watch_waits
from tutti.launch.whereabouts import collective, may_wait, user_line

STOPPED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
# Python's own exit code where the last output cannot be written.
UNWRITTEN = 120
# A failed rank's interpreter gets this long to shut down: it may wait for peers that are gone.
EXIT_SECONDS = 5.0
RECORD_SECONDS, POLL_SECONDS = 1.0, 0.01
AGAIN_SECONDS = 1.0
SECOND_GPU = "/dev/nvidia1"
# Descriptors for the end of a rank: its script may have used all others. The first is free for records.
_spare = [open(os.devnull)]  # noqa: SIM115
_nowhere = open(os.devnull, "w")  # noqa: SIM115 (faulthandler writes there until the end)


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    rank, run_dir = int(os.environ["RANK"]), Path(RUN_DIR.read())
    if not run_dir.is_dir():  # the launcher was told to end while it started this rank
        os._exit(INTERRUPTED)
    with _room_in(run_dir):
        note_pid(run_dir, rank)
    _detach()
    stand_in(rank, run_dir)
    with _room_in(run_dir):
        note_script(run_dir, rank)
        _trace_crashes(rank, run_dir)
    _record_on_stop(rank, run_dir)
    watch_waits()
    script, arguments = Script.of(sys.argv[1:])
    sys.path[0] = script.folder
    _choose_gpu()
    code = _run(script, arguments, rank, run_dir)
    _ended.set()
    _note(run_dir, Exit(rank, code, time.monotonic()))
    _finish(code)
    if not _flush() and not code:
        code = UNWRITTEN
        _note(run_dir, Exit(rank, code, time.monotonic()))
    os._exit(code)


@contextlib.contextmanager
def _room_in(run_dir: Path) -> Iterator[None]:
    """The launcher has found room before; another program may have taken it since."""
    try:
        yield
    except OSError as error:
        print(without_room(run_dir.parent, error), file=sys.stderr, flush=True)
        os._exit(2)


def _choose_gpu() -> None:
    """Let "cuda" mean this rank's GPU in a script that is written for one device.

    It means the first one by itself. The script may still set variables that CUDA reads at its start.
    """
    if not os.path.exists(SECOND_GPU):
        return
    from tutti.launch.ranks import choose_gpu
    from tutti.torch_private.gpus import when_cuda_starts

    when_cuda_starts(choose_gpu)


def _run(script: Script, arguments: list[str], rank: int, run_dir: Path) -> int:
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        script.run(arguments)
    except SystemExit as exc:
        return exit_code(exc)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as exc:
        _ending.set()
        failure = _failure(exc, rank, time.monotonic())
        if signal.SIGINT in _received and failure.collective:
            return INTERRUPTED  # an interrupted peer has left
        if not _note(run_dir, failure):
            print(failure.text, file=sys.stderr)
        return 1
    return 0


def _note(run_dir: Path, record: Record) -> bool:
    """Write a record; False if that fails (a full disk), which must not hide the cause."""
    with contextlib.suppress(IndexError):
        _spare.pop().close()
    try:
        write_record(run_dir, record)
    except OSError:
        return False
    return True


def _finish(code: int) -> None:
    """Do what Python does at its exit, but for its last phase, in which Gloo's threads may abort.

    A failed rank does not destroy process groups either: it would wait for peers that may be gone. Servers
    do not learn that it has left: workers in steps together would go on without it.
    """
    if code:
        forget_good_end()
        try:
            faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=_nowhere)
        except RuntimeError:  # no thread can start
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)
        if ranks := sys.modules.get("tutti.launch.ranks"):
            atexit.unregister(ranks.leave)
    getattr(threading, "_shutdown", lambda: None)()  # waits for threads, as multiprocessing does
    atexit._run_exitfuncs()


def _flush() -> bool:
    """Write the end of what the script has printed; False if that fails. A closed stream has none."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except Exception as error:
            written, name = False, getattr(stream, "name", "the output")
            said = f"the end of {name} is lost: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError, ValueError):
                print(said, file=sys.stderr, flush=True)
    return written


def _trace_crashes(rank: int, run_dir: Path) -> None:
    """On a crash (SIGSEGV and the like) write Python's stack to a file for the report."""
    file = open(crash_file(run_dir, rank), "w")  # noqa: SIM115 (it stays open until the end)
    faulthandler.enable(file=file, all_threads=False)


def _failure(exc: BaseException, rank: int, seconds: float) -> Failure:
    exc = _first_of(exc)
    stack = traceback_stack(exc.__traceback__)
    is_tutti, is_comm = isinstance(exc, TuttiError), isinstance(exc, CommError)
    in_collective = collective(stack) if is_comm or _in_transport(stack) else ""
    return Failure(
        rank,
        type(exc).__name__,
        error_text(exc),
        seconds,
        is_tutti=is_tutti,
        is_comm=is_comm,
        line=user_line(stack),
        collective=in_collective,
        said=(error_text(exc) if is_tutti else traceback.format_exception_only(exc)[0]).partition(
            "\n"
        )[0],
    )


def _first_of(exc: BaseException) -> BaseException:
    """The user's own exception, in whose `except` or `finally` a collective has failed: a save at the end,
    for which the other ranks did not come."""
    one: BaseException | None = exc
    of_transport: BaseException | None = None  # the cause of the `CommError` before
    while one is not None:
        if isinstance(one, CommError):
            of_transport = one.__cause__
        elif one is not of_transport and not _in_transport(traceback_stack(one.__traceback__)):
            return one
        one = one.__context__
    return exc


def _in_transport(stack: Stack) -> bool:
    return bool(stack) and "distributed" in stack[0].file


def _detach() -> None:
    """No keyboard, line-buffered output, its own process group, and an end with the launcher's."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    die_with_parent()


# Signals received, and whether the script has raised and its record is being written.
_received: set[int] = set()
_ending = threading.Event()
_ended = threading.Event()  # the script has


def _record_on_stop(rank: int, run_dir: Path) -> None:
    """On SIGTERM, record this rank's stack and end, even while it waits in a collective.

    Python runs a signal's handler only once the main thread is back in Python, which is not the case in a
    rank that waits for a dead one. So the interpreter's wake-up pipe notifies a thread, which reads the
    stack.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _stop)
    os.register_at_fork(after_in_child=_forget)
    watch = threading.Thread(
        target=_watch, args=(reading, rank, run_dir), name="tutti-stop", daemon=True
    )
    watch.start()


def _watch(reading: int, rank: int, run_dir: Path) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    while True:
        for number in os.read(reading, 64):
            _received.add(number)
            if number == signal.SIGINT:
                again = threading.Thread(target=_interrupt_again, args=(main_thread,), daemon=True)
                again.start()
            if number != signal.SIGTERM:
                continue
            seconds = time.monotonic()
            line, what = _last_place(main_thread)
            _note(run_dir, StoppedAt(rank, line, what, seconds))
            if signal.getsignal(signal.SIGTERM) is _stop:
                _keep_records()
                os._exit(STOPPED)


def _interrupt_again(main_thread: int) -> None:
    """Interrupt an import that goes on: code that can do without a module may have dropped the signal.

    Once the script has asked for its ranks it may save: then it is left alone.
    """
    while not (_ended.is_set() or _ending.is_set() or _has_asked_for_ranks()):
        time.sleep(AGAIN_SECONDS)
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        if any(x.file.startswith("<frozen importlib") for x in stack_of(main_thread)):
            os.kill(os.getpid(), signal.SIGINT)
            return  # the signal starts the next watch


def _has_asked_for_ranks() -> bool:
    ranks = sys.modules.get("tutti.launch.ranks")
    return ranks is not None and ranks.asked.is_set()


def _keep_records() -> None:
    """Write the steps that the records of the run lack."""
    records = sys.modules.get("tutti.recording.run_writer")
    made = records.writer() if records is not None else None
    if made is not None:
        made.flush()


def _last_place(main_thread: int) -> tuple[str, str]:
    """The main thread's line and collective once it waits in one, or a second later.

    It may be about to wait, or about to raise because a peer is gone: that place tells more.
    """
    until = time.monotonic() + RECORD_SECONDS
    stack = stack_of(main_thread)
    found = _place(stack)
    while time.monotonic() < until and (_ending.is_set() or not found[1]):
        time.sleep(POLL_SECONDS)
        before, stack = stack, stack_of(main_thread)
        stands = stack == before and may_wait(stack)
        found = _place(frames_of(main_thread) if stands else stack)
    return found


def _place(stack: Stack) -> tuple[str, str]:
    return user_line(stack), collective(stack)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """This process's handler; a script that sets its own handler ends by itself."""


def _forget() -> None:
    """Restore the signals in a forked child (a data loader's), which is no rank."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _stop:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
