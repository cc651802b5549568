"""Shows the user a line of any rank: the output of most ranks is not visible."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tutti.environment import RUN_DIR
from tutti.launch.records import Noted, SavedLast, read_record, write_record
from tutti.recording.run_writer import launcher_writer


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


def tell_last_save(step: int) -> None:
    """Have the report of a run that a signal ends say that this rank has saved `step`."""
    if run_dir := RUN_DIR.read():
        with contextlib.suppress(OSError):
            write_record(Path(run_dir), SavedLast(int(os.environ.get("RANK", "0")), step))


class ToldLines:
    """The launcher's side: prints what the processes of a run tell."""

    def __init__(self, run_dir: Path, num_ranks: int) -> None:
        self._run_dir, self._num_ranks = run_dir, num_ranks
        self._shown: set[str] = set()

    def show(self) -> None:
        """Print the lines that are new; several processes have the same ones."""
        for rank in range(self._num_ranks):
            found = read_record(self._run_dir, Noted, rank)
            for line in found.lines if found is not None else ():
                if line not in self._shown:
                    self._shown.add(line)
                    show(line)


def show(text: str) -> None:
    """Print what the launcher says, and record it."""
    print(text, file=sys.stderr, flush=True)
    if (out := launcher_writer()) is not None:
        out.write("said", text=text)
