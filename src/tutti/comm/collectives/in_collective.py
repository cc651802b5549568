"""Records a rank's current collective, and names it in the collective's errors."""

from __future__ import annotations

from typing import Any

import torch

from tutti.comm.collectives.failure import Wait, comm_error, now_seconds
from tutti.comm.collectives.groups import Axes, Groups


class InCollective:
    """Runs collectives over `groups`, and records the current one.

    `current` is the collective in progress, or the one that failed; None between them.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.current: Wait | None = None

    def waiting(self, name: str, axes: Axes, nbytes: int) -> _Waiting:
        """A `with` around one collective: `current` names it, and so do errors."""
        return _Waiting(self, Wait(name, axes, nbytes, now_seconds()))


class _Waiting:
    """Context manager of every collective; one from a generator would cost three times as much."""

    __slots__ = ("_owner", "_wait")

    def __init__(self, owner: InCollective, wait: Wait) -> None:
        self._owner, self._wait = owner, wait

    def __enter__(self) -> None:
        self._owner.current = self._wait

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._owner.current = None
        elif isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            name, axes, nbytes, _ = self._wait
            raise comm_error(error, name, axes, nbytes, self._owner.groups[axes]) from error
