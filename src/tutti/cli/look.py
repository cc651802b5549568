"""Runs a user's script up to its first training step, to inspect the step instead of taking it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tutti.capture.batch import called
from tutti.distributed_step import LOOK, Step
from tutti.environment import LAYOUT
from tutti.errors import CaptureError


class _Seen(BaseException):
    """Ends the script after the inspection of its step; no `except Exception` of the script stops it."""


def look(
    script: Path, arguments: list[str], layout: str, seen: Callable[[Step, tuple[Any, ...]], None]
) -> None:
    """Run `script` as `python script arguments` does, and pass its first training step to `seen`.

    Earlier steps without an optimizer run on one device.
    Raises `CaptureError` when the script ends without calling a training step.
    """

    def first(step: Step, batch: tuple[Any, ...]) -> Any:
        if step.optimizer is None:
            return called(step.train_step, (step.model,), batch)
        LOOK.set(None)
        raise _Seen(step, batch)

    token = LOOK.set(first)
    kept = sys.argv, sys.path[:], os.environ.get(LAYOUT.name)
    os.environ[LAYOUT.name] = layout
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # hides the script's own output
            runpy.run_path(str(script), run_name="__main__")
    except _Seen as found:
        step, batch = found.args
    else:
        raise CaptureError(
            f"{script} ended without calling a training step",
            why="no Step made by tutti.distribute(train_step, model, optimizer) was called",
            fix="call the step in the script's normal course",
        )
    finally:
        LOOK.reset(token)
        sys.argv, sys.path[:] = kept[0], kept[1]
        os.environ.pop(LAYOUT.name)
        if kept[2] is not None:
            os.environ[LAYOUT.name] = kept[2]
    seen(step, batch)
