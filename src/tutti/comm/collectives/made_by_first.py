"""A text that the first rank makes while the others wait, however long that takes.

    rank 0   makes the text .............................. done     main thread
             meets   meets   meets   meets   meets   meets          a thread of its own
    rank 1   meets   meets   meets   meets   meets   meets   text

The ranks meet every few seconds, so each wait is short, and a rank that dies or stops is noticed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.errors import CommError

_MOST_SECONDS = 2.0  # between two meetings


def made_by_first(make: Callable[[Callable[[], None]], str], name: str) -> str:
    """The text of `make`, on all ranks, which call this together; only the first rank calls `make`.

    Args:
        make: gets a function to call now and then, which raises if another rank has gone.
        name: what the ranks wait for, for errors.

    Raises:
        CommError: on the other ranks, if `make` has failed or the first rank has gone; on the first one, if
            another has gone.
    """
    world = Group.world()
    if dist.get_rank() != 0:
        while not (said := exchange_texts("", world, name)[0]):
            pass
        text, failed = json.loads(said)
        if failed:
            raise CommError(f"rank 0 failed in {name}", why=failed)
        return text
    meetings = _Meetings(world, name)
    try:
        text = make(meetings.check)
    except Exception as error:
        meetings.end()
        if meetings.error is None:
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            exchange_texts(json.dumps(["", failed]), world, name)
        raise
    finally:
        meetings.end()
    meetings.check()
    exchange_texts(json.dumps([text, ""]), world, name)
    return text


class _Meetings:
    """The first rank's thread that meets the others."""

    def __init__(self, world: Group, name: str) -> None:
        self._world, self._name = world, name
        self._seconds = min(_MOST_SECONDS, collective_timeout().total_seconds() / 4)
        self.error: CommError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._meet, name="tutti-meetings", daemon=True)
        self._thread.start()

    def _meet(self) -> None:
        while not self._done.wait(self._seconds):
            try:
                exchange_texts("", self._world, self._name)
            except CommError as error:
                self.error = error
                return

    def check(self) -> None:
        """Raise the error of the last meeting, if it has failed."""
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End after the meeting under way."""
        self._done.set()
        self._thread.join()
