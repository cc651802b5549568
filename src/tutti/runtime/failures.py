"""One report for a run that failed: which rank, why, and where the others waited for it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from tutti.comm.failure import lost_peer
from tutti.runtime.records import Exit, Failure, Place, read_record

TAIL_NBYTES = 4000
# What a rank that the agent stopped ends with.
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended: its exit code (minus a signal's number if that killed it) and records."""

    rank: int
    exit_code: int | None
    failure: Failure | None
    place: Place | None
    ended: Exit | None
    log: Path | None

    @property
    def is_victim(self) -> bool:
        """Whether the rank ended only because another one did."""
        if self.failure is not None:
            return bool(self.failure.collective) and lost_peer(self.failure.text)
        return self.exit_code in _STOPPED or self.left_early

    @property
    def left_early(self) -> bool:
        """Whether the script ended in good order, though others had not."""
        return (
            self.ended is not None
            and self.ended.code == 0
            and (not self.exit_code or self.exit_code in _STOPPED)
        )

    @property
    def how(self) -> str:
        """Such as "failed (ValueError)", "died (signal 9)", "left early (exit code 0)"."""
        if self.failure is not None:
            return f"failed ({self.failure.kind})"
        if self.left_early:
            return "left early (exit code 0)"
        if self.exit_code is not None and self.exit_code < 0:
            return f"died (signal {-self.exit_code})"
        return f"ended (exit code {self.exit_code or 0})"

    @property
    def where(self) -> str:
        """Such as "waited in all_reduce over data (4 kB) at train.py:12"; "" if not known."""
        known = self.failure or self.place
        if known is None or not known.line:
            return ""
        verb = f"waited in {known.collective}" if known.collective else "was"
        return f"{verb} at {known.line}"


def read_ends(
    run_dir: Path, exit_codes: dict[int, int], num_ranks: int, logs: dict[int, Path]
) -> list[RankEnd]:
    """What is known of every rank's end."""
    return [
        RankEnd(
            rank,
            exit_codes.get(rank),
            read_record(run_dir, Failure, rank),
            read_record(run_dir, Place, rank),
            read_record(run_dir, Exit, rank),
            logs.get(rank),
        )
        for rank in range(num_ranks)
    ]


def first_cause(ends: list[RankEnd]) -> RankEnd:
    """The rank whose end made the others end."""

    def order(end: RankEnd) -> tuple[bool, bool, float]:
        succeeded = end.exit_code in (None, 0) and end.failure is None
        return (succeeded, end.is_victim, end.failure.seconds if end.failure else 0.0)

    cause = min(ends, key=order)
    left_early = [end for end in ends if end.left_early]
    # Only ranks that lost a peer failed: what they lost is one that had ended in good order.
    return left_early[0] if cause.is_victim and left_early else cause


def report(ends: list[RankEnd]) -> str:
    """The first failed rank's traceback, and a `CommError` line for those that waited for it."""
    cause = first_cause(ends)
    blocks = [f"[rank {cause.rank}] {cause.failure.text}"] if cause.failure else []
    if cause.failure is None and (tail := _tail(cause.log)):
        blocks.append(f"[rank {cause.rank}] {tail}")
    others = [end for end in ends if end is not cause and (end.is_victim or end.failure is None)]
    waits = [f"rank {end.rank} {end.where}" for end in others if end.where]
    if cause.failure is None or waits:
        blocks.append(_comm_line(cause, waits))
    return "\n".join(blocks)


def exit_code(ends: list[RankEnd]) -> int:
    """2 for a mistake that tutti names, the script's own code where it chose one, else 1."""
    cause = first_cause(ends)
    if cause.failure is None:
        return 1 if cause.is_victim else max(cause.exit_code or 1, 1)
    return 2 if cause.failure.is_tutti and not cause.failure.is_comm else 1


def _comm_line(cause: RankEnd, waits: list[str]) -> str:
    if cause.failure and cause.failure.is_comm:
        return "\n".join(f"  {wait}" for wait in waits)
    text = f"rank {cause.rank} {cause.how}" + "".join(f"; {wait}" for wait in waits)
    return f"CommError: {text}" if waits or (cause.exit_code or 0) < 0 else text


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    return log.read_bytes()[-TAIL_NBYTES:].decode(errors="replace").strip()
