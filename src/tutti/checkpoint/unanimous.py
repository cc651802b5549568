"""Ranks that save or load together: all raise the error of one, with its message."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.failure import called_alone
from tutti.comm.collectives.group import Group
from tutti.errors import CheckpointError, CommError, TuttiError

_MORE_FILES = "close files, or allow more of them: ulimit -n"
# What a save or a load lacks, where it is not a place for the files.
_FIXES = {
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
    errno.EFBIG: "larger files for this process: ulimit -f",
    errno.ENOMEM: "more memory for this process: fewer ranks on its host, or a higher limit (ulimit -v)",
}
_PARTS = ("what", "at", "why", "fix")


class Unanimous:
    """The ranks that take part in a save or a load.

    Args:
        group: of these ranks; None for a single process.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.position = group.position if group is not None else 0
        self.size = group.size if group is not None else 1
        self.first_rank = group.ranks[0] if group is not None else 0

    @property
    def leads(self) -> bool:
        """Whether this rank does the work of one rank for all."""
        return self.position == 0

    def each(self, what: str, act: Callable[[], str]) -> list[str]:
        """Run `act` on every rank; its texts in the ranks' order.

        Args:
            what: a description of the failure, such as "cannot write the checkpoint runs/gpt", for errors
                without one.

        Raises:
            CheckpointError: on every rank, the error of the first failed one.
            CommError: a rank has gone, or does not come within `TUTTI_TIMEOUT`.
        """
        text, error = "", None
        try:
            text = act()
        except (Exception, CheckpointException) as found:  # the latter is a BaseException
            error = found
        said = None if error is None else error_parts(what, error)
        found = [json.loads(x) for x in self._exchange(json.dumps([text, said]), what)]
        for position, (_, parts) in enumerate(found):
            if parts is not None:
                raise error_of(parts, position if self.size > 1 else None) from error
        return [text for text, _ in found]

    def _exchange(self, text: str, what: str) -> list[str]:
        if self._group is None:
            return [text]
        try:
            return exchange_texts(text, self._group, "a save or a load")
        except CommError as error:
            alone = called_alone(error, "all ranks save and load together")
            if alone is error:
                raise
            raise CommError(f"{what}: {alone.what}", why=alone.why, fix=alone.fix) from error

    def lead(self, what: str, act: Callable[[], str]) -> str:
        """Run `act` on the first rank alone; its text on every rank."""
        return self.each(what, act if self.leads else lambda: "")[0]


def ranks_of(group: Group | None = None) -> Unanimous:
    """The ranks of `group`, by default all ranks of the run."""
    if group is None and dist.is_initialized():
        group = Group.world()
    return Unanimous(group if group is not None and group.size > 1 else None)


def parts_of(error: TuttiError) -> list[str]:
    """The parts of the message of an error, for `error_of`."""
    return [getattr(error, part) for part in _PARTS]


def error_parts(what: str, error: BaseException) -> list[str]:
    """The parts of a `CheckpointError` for an error; `what` describes one without a description."""
    if isinstance(error, CheckpointError):
        return parts_of(error)
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError):
        error = _of_the_system(error) or error
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror + (f": {error.filename}" if error.filename else "")
        fix = _FIXES.get(
            error.errno or 0, "a folder that can be written, with room for the checkpoint"
        )
    else:
        first = next(iter(str(error).splitlines()), "")
        why = f"{type(error).__name__}: {first}" if first else type(error).__name__
        fix = _FIXES[errno.ENOMEM] if isinstance(error, MemoryError) else ""
    return [what, "", why, fix]


def _of_the_system(error: BaseException) -> OSError | None:
    """The error of the file behind another one: torch.save ends a file that it cannot write by its own."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.strerror):
        found = found.__cause__ or found.__context__
    return found


def error_of(parts: Sequence[str], position: int | None = None) -> CheckpointError:
    """The error with these parts, of the rank at `position` if it names no place."""
    what, at, why, fix = parts
    if position is not None and not at:
        at = f"rank {position}"
    return CheckpointError(what, at=at, why=why, fix=fix)
