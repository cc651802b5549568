"""Shows the user a line of any rank: the output of most ranks is not visible."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tutti.environment import RUN_DIR
from tutti.launch.records import Noted, read_record, write_record


def tell(line: str) -> None:
    """Have the launcher print `line` once, whichever ranks tell it; without `tutti run`, print it here."""
    run_dir, rank = RUN_DIR.read(), int(os.environ.get("RANK", "0"))
    if run_dir:
        try:
            found = read_record(Path(run_dir), Noted, rank)
            lines = found.lines if found is not None else []
            return write_record(Path(run_dir), Noted(rank, [*lines, line]))
        except OSError:
            pass  # such as a full disk
    print(line, file=sys.stderr, flush=True)
