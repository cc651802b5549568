"""The folder of a run's report: the names of its files, and whether it can be written.

runs/gpt/
    launcher.jsonl      what the launcher did: command, end, restarts
    rank-0.jsonl        the records of a rank; `worker-0.jsonl` in a run with servers
    rank-0.json         the trace of a rank (`--profile` into the same folder)
    verify.json         the verdict of `tutti verify --report`
    plan.json           the plan, if there is one
    report.html         the page
"""

from __future__ import annotations

import os
from pathlib import Path

from tutti.durable import check_writable
from tutti.environment import ROLE

LAUNCHER = "launcher"
RECORDS_SUFFIX = ".jsonl"
PAGE, VERDICT, PLAN = "report.html", "verify.json", "plan.json"


def process_name() -> str:
    """`rank 3`, or the role in a run with servers: `worker 0`, `worker 0.1`, `server 1`."""
    return ROLE.read() or f"rank {os.environ.get('RANK', '0')}"


def records_file(folder: Path, name: str) -> Path:
    """The file of the process called `name`."""
    return folder / f"{name.replace(' ', '-')}{RECORDS_SUFFIX}"


def check_report_folder(folder: Path) -> None:
    """Make the folder of a report. Records of earlier starts stay: a run that goes on adds to them.

    Raises:
        TuttiError: it cannot be made or written to.
    """
    check_writable(folder, "report", "--report with a folder that you may write to")
