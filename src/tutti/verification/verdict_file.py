"""A verdict as a file, for the report of a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from tutti.durable import write_whole
from tutti.errors import TuttiError
from tutti.recording.report_folder import VERDICT
from tutti.recording.run_writer import finite
from tutti.verification.verdict import Verdict


def write_verdict(folder: Path, verdict: Verdict) -> Path:
    """Write `verify.json` whole; returns its path. Raises `TuttiError` if it cannot be written."""
    path = folder / VERDICT
    shown = {"time": time.time(), "text": str(verdict), **asdict(verdict)}
    try:
        write_whole(path, json.dumps(finite(shown), default=str).encode())
    except OSError as error:
        raise TuttiError(
            f"cannot write the verdict {path}", why=str(error), fix="a folder that you may write to"
        ) from error
    return path
