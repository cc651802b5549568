"""Runs a user's script up to its first training step, to inspect the step instead of taking it.

The answer is made and shown within the call of the step, and the process ends there: what the script would do
next (`except`, a `finally` that saves weights) does not happen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import typer

from tutti.capture.batch import called
from tutti.cli.ends import OwnProcess, told
from tutti.cli.hidden_output import HiddenOutput
from tutti.distributed_step import LOOK, Step
from tutti.environment import LAYOUT
from tutti.errors import CaptureError, TuttiError
from tutti.launch.script import Script, exit_code

T = TypeVar("T")


class _Seen(BaseException):
    """Ends the script after the answer where the process must go on; no `except Exception` stops it."""


def look(
    script: Script,
    arguments: list[str],
    layout: str,
    seen: Callable[[Step, tuple[Any, ...]], T],
    show: Callable[[T], int | None],
) -> None:
    """Run `script` as Python does, pass its first training step to `seen`, and what this returns to `show`.

    Earlier steps without an optimizer run on one device. `show` prints, in the folder of the command, and
    returns an exit code other than 0, if any; what else is printed to stdout is hidden. The command's own
    process ends then.

    Raises:
        typer.Exit: in a process that goes on, if the exit code is not 0. An error has been printed: that of
            `seen` or `show`, or a `CaptureError`, where the script ends without calling a training step.
    """
    folder, threads = os.getcwd(), set(threading.enumerate())
    kept = sys.argv, sys.path[:], os.environ.get(LAYOUT.name)
    os.environ[LAYOUT.name] = layout
    sys.path.insert(0, script.folder)
    with HiddenOutput() as output:
        looking = _Looking(seen, show, output, folder)
        LOOK.append(looking)
        ended: BaseException | None = None
        try:
            script.run(arguments)
        except BaseException as error:
            ended = error
        try:
            code = looking.code_at_end(script, ended, threads)
        finally:
            LOOK.pop()
            sys.argv, sys.path[:] = kept[0], kept[1]
            os.environ.pop(LAYOUT.name)
            if kept[2] is not None:
                os.environ[LAYOUT.name] = kept[2]
            os.chdir(folder)
    if code:
        raise typer.Exit(code)


class _Looking(Generic[T]):
    """Answers the first training step, of any thread; what the script does later changes nothing."""

    def __init__(
        self,
        seen: Callable[[Step, tuple[Any, ...]], T],
        show: Callable[[T], int | None],
        output: HiddenOutput,
        folder: str,
    ) -> None:
        self._seen, self._show, self._output, self._folder = seen, show, output, folder
        self._one_at_a_time = threading.Lock()
        self._thread: int | None = None  # that answers
        self._code: int | None = None

    def __call__(self, step: Step, batch: tuple[Any, ...]) -> Any:
        if self._thread == threading.get_ident():
            return NotImplemented  # a call within the step that is inspected
        if step.optimizer is None and self._code is None:
            return called(step.train_step, (step.model,), batch)
        with self._one_at_a_time:
            if self._code is None:
                self._thread = threading.get_ident()
                self._code = self._answered(step, batch)
                OwnProcess.leave(self._code)
                self._thread = None
        raise _Seen

    def _answered(self, step: Step, batch: tuple[Any, ...]) -> int:
        try:
            step.mode.running.job.refuse_empty(batch)
            made = self._seen(step, batch)
            os.chdir(self._folder)
            with self._output.shown():
                return self._show(made) or 0
        except BaseException as error:
            return told(error)

    def code_at_end(
        self, script: Script, ended: BaseException | None, threads: set[threading.Thread]
    ) -> int:
        """The exit code once the script has ended, by an error if `ended`; `threads` were there before it."""
        well = ended is None or (isinstance(ended, SystemExit) and not ended.code)
        if well and self._code is None:  # as Python does
            for one in threading.enumerate():
                if not (one.daemon or one in threads):
                    one.join()
        with self._one_at_a_time:
            if self._code is None:
                self._code = _told_without_step(script, ended)
                OwnProcess.leave(self._code)
            return self._code


def _told_without_step(script: Script, ended: BaseException | None) -> int:
    """Tell that the script has ended without a training step; the exit code."""
    code = 0
    if isinstance(ended, SystemExit):
        code = exit_code(ended)
    elif ended is not None:
        code = told(ended)
        if isinstance(ended, TuttiError) or not isinstance(ended, Exception):
            return code
    if code:
        told(CaptureError(f"{script} ended with exit code {code} before its first training step"))
        return code
    return told(
        CaptureError(
            f"{script} ended without calling a training step",
            why="no Step made by tutti.distribute(train_step, model, optimizer) was called",
            fix="call the step in the script's normal course",
        )
    )
