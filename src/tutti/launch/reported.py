"""A run whose processes keep records for its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.environment import REPORT
from tutti.recording.run_writer import launcher_writer


def reported(folder: Path, told: Mapping[str, Any], start: Callable[[], int]) -> int:
    """The exit code of `start()`, whose processes keep records in `folder`.

    Args:
        folder: it exists.
        told: what the records say of the run: its command, its layout.
        start: starts the processes, and waits for their end.

    """
    os.environ[REPORT.name] = str(folder.resolve())
    out = launcher_writer()
    assert out is not None
    out.write("run", **told)
    code: int | None = None
    try:
        code = start()
        return code
    finally:
        out.write("ended", code=code)
