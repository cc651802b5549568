"""Asks another rank of this run for its stack; the rank's watching thread answers.

    rank 0   writes rank1.ask.TOKEN         rank 1's thread   looks for it twice a second
    rank 0   reads rank1.answer.TOKEN       rank 1's thread   writes it

Both are files of the run's directory, so this is for ranks that `tutti run` has started on one host. A
stopped rank, or one whose native code holds the interpreter, cannot answer: the kernel shows which it is.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.comm.host.life import state_of
from tutti.launch.records import read_script
from tutti.launch.thread_stacks import Stack
from tutti.launch.whereabouts import collective, lines, user_line

ANSWER_SECONDS, _POLL_SECONDS = 3.0, 0.1
_STATES = {"T": "is stopped", "t": "is held by a debugger", "Z": "has ended", "": "has ended"}


@dataclass(frozen=True)
class Answer:
    """A rank's stack, or the reason (`why`) for its silence."""

    line: str = ""
    collective: str = ""
    stack: tuple[str, ...] = ()
    why: str = ""

    def said(self, rank: int) -> str:
        """A heading, and the stack below it, outermost first."""
        if self.why:
            return f"  rank {rank}: {self.why}"
        where = f"in {self.collective} at {self.line}" if self.collective else f"at {self.line}"
        begin = f"  rank {rank} is {where if self.line else 'in no line of the script'}"
        return "\n".join([f"{begin}:" if self.stack else begin, *(f"    {x}" for x in self.stack)])


def ask(run_dir: Path, rank: int, seconds: float = ANSWER_SECONDS) -> Answer:
    """The answer of `rank` within this number of seconds."""
    pid = read_script(run_dir, rank)
    if pid is None:
        return Answer(why="it has not started its script yet")
    if (state := state_of(pid)) in _STATES:
        return Answer(why=f"process {pid} {_STATES[state]}")
    token = secrets.token_hex(8)
    asked, answered = run_dir / f"rank{rank}.ask.{token}", run_dir / f"rank{rank}.answer.{token}"
    asked.touch()
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if answered.exists():
                found = json.loads(answered.read_text())
                return Answer(**{**found, "stack": tuple(found["stack"])})
            time.sleep(_POLL_SECONDS)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    running = "computes" if state_of(pid) == "R" else "waits in the kernel"
    return Answer(why=f"process {pid} {running} and does not answer: native code holds its Python")


def answer(run_dir: Path, rank: int, stack: Stack) -> None:
    """Answer all requests to this rank."""
    begin = f"rank{rank}.ask."
    for name in os.listdir(run_dir):
        if not name.startswith(begin):
            continue
        said = Answer(user_line(stack), collective(stack), tuple(lines(stack)))
        token = name.removeprefix(begin)
        partial = run_dir / f"rank{rank}.partial.{token}"
        partial.write_text(json.dumps(asdict(said)))
        partial.replace(run_dir / f"rank{rank}.answer.{token}")
        (run_dir / name).unlink(missing_ok=True)
