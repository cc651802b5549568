"""One report for a failed run: the rank, the cause, and the lines at which the others waited for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tutti.comm.collectives.failure import late_peer, lost_peer, named_ranks
from tutti.launch.guard import Seen
from tutti.launch.records import Exit, Failure, SavedLast, StoppedAt, crash_file, read_record

TAIL_NBYTES = 4000
# The exit codes of a rank that was told to stop.
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)
_UNKNOWN = float("inf")
UNSEEN = Seen()
# So much later than the other ranks the launcher may notice the end of one.
SEEN_SECONDS = 2.0

# In the messages of Gloo, also where no collective is known.
_OF_TRANSPORT = "gloo/transport/"
_WAITED_MS = re.compile(r"waiting (\d+)ms")


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank: its exit code (minus a signal's number if that killed it) and records.

    `seen` has the launcher's observations and actions, `crash` Python's lines at a crash, `saved` its last
    save.
    """

    rank: int
    exit_code: int | None
    failure: Failure | None
    stopped_at: StoppedAt | None
    ended: Exit | None
    log: Path | None
    seen: Seen = UNSEEN
    crash: str = ""
    saved: SavedLast | None = None

    @property
    def is_victim(self) -> bool:
        """Whether the rank ended only because another one did, or the launcher ended it."""
        if self.failure is not None:
            text = self.failure.text
            waited = self.failure.is_comm or self.failure.collective or _OF_TRANSPORT in text
            return bool(waited) and lost_peer(text)
        if self.was_stopped:
            return False
        return self.seen.killed or self.exit_code in _STOPPED or self.left_early

    @property
    def waited_in_vain(self) -> bool:
        """Whether a collective of the script's own, by torch.distributed, has waited beyond its limit."""
        said = self.failure.said if self.failure is not None and not self.failure.is_tutti else ""
        return _OF_TRANSPORT in said and late_peer(said)

    @property
    def was_stopped(self) -> bool:
        """Whether the rank was stopped (SIGSTOP) and did not resume."""
        return self.failure is None and self.seen.stopped is not None

    @property
    def succeeded(self) -> bool:
        """Whether the rank ended well, as far as known."""
        return self.exit_code in (None, 0) and self.failure is None and not self.was_stopped

    @property
    def is_of_script(self) -> bool:
        """Whether the script failed by itself: an exception, or an exit code that it chose."""
        if self.failure is not None:
            return not (self.is_victim or self.failure.is_comm)
        chosen = self.ended is not None and self.ended.code != 0
        return chosen and self.exit_code not in (*_STOPPED, *_INTERRUPTED)

    @property
    def seconds(self) -> float:
        """The time of the rank's loss (monotonic), by its own or the launcher's record; else infinity."""
        notes = (self.failure, self.stopped_at, self.ended)
        times = [*(note.seconds for note in notes if note is not None), self.seen.seconds]
        return min((t for t in times if t is not None), default=_UNKNOWN)

    @property
    def left_early(self) -> bool:
        """Whether the script ended in good order, though others had not."""
        return (
            self.ended is not None
            and self.ended.code == 0
            and (not self.exit_code or self.exit_code in _STOPPED)
        )

    @property
    def is_gone(self) -> bool:
        """Whether the rank ended with exit code 0, in good order or without Python's exit."""
        without = self.ended is None and self.exit_code == 0
        return self.left_early or (without and self.failure is None and not self.was_stopped)

    def left_before(self, seconds: float) -> bool:
        """Whether a rank that `is_gone` was gone at a time, or may have been."""
        noted = self.ended is not None and self.ended.seconds is not None
        late = 0.0 if noted else SEEN_SECONDS
        return self.seconds == _UNKNOWN or self.seconds - late < seconds

    @property
    def how(self) -> str:
        """Such as "failed (ValueError)", "died (signal 11, SIGSEGV)", "left early (exit code 0)"."""
        code = self.exit_code
        if self.failure is not None:
            return f"failed ({self.failure.kind})"
        if self.was_stopped:
            killed = "; the launcher has killed it" if self.seen.killed else ""
            return f"was stopped (SIGSTOP) and did not go on{killed}"
        if self.left_early:
            return "left early (exit code 0)"
        if self.seen.killed:
            return "did not end when told to, and was killed by the launcher"
        if code in _STOPPED:
            return "was ended by SIGTERM, which the launcher did not send"
        if code in _INTERRUPTED:
            return "was interrupted by SIGINT, which the launcher did not send"
        if code == -signal.SIGKILL:
            reason = f", {self.seen.shortage}" if self.seen.shortage else ""
            return f"died (signal 9){reason}"
        if code is not None and code < 0:
            return f"died (signal {-code}, {signal.Signals(-code).name})"
        by = (
            ""
            if self.ended is not None or code is None
            else ", without Python's exit, as by os._exit"
        )
        return f"ended (exit code {code or 0}{by})"

    @property
    def said(self) -> str:
        """`how`, or an exception's message: "failed: ValueError: no"."""
        said = self.failure.said if self.failure is not None else ""
        return f"failed: {said}" if said else self.how

    @property
    def where(self) -> str:
        """Such as "waited in all_reduce over data (4 kB) at train.py:12"; "" if not known."""
        known = self.failure or self.stopped_at
        if known is None or not known.line:
            return ""
        verb = f"waited in {known.collective}" if known.collective else "was"
        return f"{verb} at {known.line}"

    @property
    def own_end(self) -> str:
        """How the script ended by itself after a signal; "" if it did not, or as the signal ends it."""
        if self.ended is None or self.failure is not None:
            return ""
        if self.saved is not None:
            return f"saved step {self.saved.step} and ended"
        code = self.ended.code
        told = code in (*_STOPPED, *_INTERRUPTED)
        return "" if told else f"ended (exit code {code})"


def read_ends(
    run_dir: Path,
    exit_codes: dict[int, int],
    num_ranks: int,
    logs: dict[int, Path],
    seen: Callable[[int], Seen],
) -> list[RankEnd]:
    """The end of every rank; `seen` returns the launcher's observations of a rank.

    `exit_codes` may lack ranks: the agent names only those that had ended when it saw the first failure.
    """
    return [
        RankEnd(
            rank,
            exit_codes.get(rank, found.code),
            read_record(run_dir, Failure, rank),
            read_record(run_dir, StoppedAt, rank),
            read_record(run_dir, Exit, rank),
            logs.get(rank),
            found,
            _text(crash_file(run_dir, rank)),
            read_record(run_dir, SavedLast, rank),
        )
        for rank in range(num_ranks)
        for found in (seen(rank),)
    ]


def first_cause(ends: list[RankEnd]) -> RankEnd:
    """The rank whose end ended the others: the first in time of those that ended by themselves."""
    raised = any(
        end.failure is not None and not (end.failure.is_comm or end.waited_in_vain) for end in ends
    )

    def order(end: RankEnd) -> tuple[bool, bool, float]:
        # A rank that no other rank reported as lost was not the cause.
        victim = end.is_victim or (end.was_stopped and raised)
        return (end.succeeded, victim, end.seconds)

    cause = min(ends, key=order)
    failure = cause.failure
    # Only ranks that lost a peer, or waited for one, failed: the peer had ended with exit code 0 before.
    before = [end for end in ends if end.is_gone and end.left_before(cause.seconds)]
    if failure is not None and (cause.is_victim or failure.is_comm) and before:
        return min(before, key=lambda end: end.seconds)
    return cause


def report(ends: list[RankEnd]) -> str:
    """The first cause and the ranks that waited for it; the traceback, or the end of its output."""
    cause = first_cause(ends)
    followed = [end for end in ends if end is not cause and _followed(end)]
    others = sorted(followed, key=lambda end: end.rank)
    waits = [f"rank {end.rank} {end.where}" for end in others if end.where]
    # `where` is unknown for a stopped rank, which could not answer.
    waits += [f"rank {end.rank} {end.how}" for end in others if end.was_stopped]
    if cause.failure is not None and cause.failure.is_tutti:
        return "\n".join([f"[rank {cause.rank}] {cause.failure.text}", *(f"  {w}" for w in waits)])
    if cause.failure is not None and cause.waited_in_vain:
        late = [end.rank for end in ends if not end.waited_in_vain]
        what = _not_joined(cause.failure, late or [end.rank for end in ends if end is not cause])
        return f"{'; '.join([what, *waits])}{_WHY_NOT_JOINED}{details(cause)}"
    mark = "CommError: " if cause.failure is None and (waits or (cause.exit_code or 0) < 0) else ""
    first = f"{mark}{'; '.join([f'rank {cause.rank} {cause.said}', *waits])}"
    return f"{first}{details(cause)}"


_WHY_NOT_JOINED = (
    "\n  why  all ranks of its group wait for each other there"
    "\n  fix  make the call on every rank: take it out of `if rank == 0:`; if a rank is only slow, "
    "set TUTTI_TIMEOUT to more seconds"
)


def _not_joined(failure: Failure, late: list[int]) -> str:
    """Says who did not come to a collective of torch.distributed, in place of the transport's text."""
    where = f" at {failure.line}" if failure.line else ""
    found = _WAITED_MS.search(failure.said)
    within = f" within {int(found[1]) / 1000:g} s" if found else " in time"
    what = failure.collective or "a collective of torch.distributed"
    return (
        f"CommError: {named_ranks(late)} did not join rank {failure.rank} in {what}{where}{within}"
    )


def details(end: RankEnd) -> str:
    """Lines below the first: the traceback, the lines of a crash or the end of the rank's output; or ""."""
    more = end.failure.text if end.failure else end.crash or _tail(end.log)
    return f"\n[rank {end.rank}] {more}" if more else ""


def ended_by(number: int, ends: list[RankEnd]) -> str:
    """The report of a run whose launcher got a signal."""
    name = signal.Signals(number).name
    own: dict[str, list[int]] = {}
    for end in ends:
        own.setdefault(end.own_end, []).append(end.rank)
    said = [f"{named_ranks(ranks)} {how}" for how, ranks in own.items() if how]
    told = [end for end in ends if end.where and (end.ended is None or end.failure is not None)]
    said += [f"rank {end.rank} {end.where}" for end in told]
    more = "".join(f"; {one}" for one in said)
    return f"ended by {name}, sent to the launcher{more}"


def where_logs(log_dir: Path | None) -> str:
    """The last line of a report."""
    if log_dir is None:
        return "--log-dir DIR keeps what each rank writes"
    return f"logs in {log_dir}"


def exit_code(ends: list[RankEnd]) -> int:
    """2 for a `TuttiError`, the script's own code if it chose one, else 1."""
    cause = first_cause(ends)
    if cause.failure is None:
        return 1 if cause.is_victim else max(cause.exit_code or 1, 1)
    return 2 if cause.failure.is_tutti and not cause.failure.is_comm else 1


def _followed(end: RankEnd) -> bool:
    """Whether a rank waited for another one, or ended without a record."""
    waited = end.is_victim or end.waited_in_vain
    return waited or end.failure is None or end.failure.is_comm


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    return log.read_bytes()[-TAIL_NBYTES:].decode(errors="replace").strip()
