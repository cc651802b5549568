"""Processes beside the ranks that save together: they meet in a store, and use no process group."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta

from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from tutti.checkpoint.unanimous import Unanimous
from tutti.comm.host.hosts import host_name
from tutti.comm.host.life import Life
from tutti.errors import CommError

# How long the first one waits for the others to have read its last texts.
_LEAVE_SECONDS = 10.0
# A process that has ended is noticed so soon.
_LOOK_SECONDS = 0.5


class StoreRanks(Unanimous):
    """The processes of one save.

    Args:
        store: of these processes; None for a single one.
        name: of this save, for keys; the same on all, and never used twice.
        position, size: of this process among them.
        seconds: for which one waits for another.
    """

    def __init__(
        self, store: Store | None, name: str, position: int, size: int, seconds: float
    ) -> None:
        super().__init__(None)
        self._store, self._name, self._seconds = store, name, seconds
        self.position, self.size = position, size
        self._round = 0
        self._lives: dict[int, Life] = {}  # of those on this host

    def _exchange(self, text: str, what: str) -> list[str]:
        store = self._store
        if store is None:
            return [text]
        self._round += 1
        said = json.dumps([host_name(), os.getpid(), text])
        try:
            store.set(self._key(self._round, self.position), said)
            found = [self._text(store, j, what) for j in range(self.size)]
            # All are in this round: all have read the last one.
            self._forget(store, self._round - 1, self.position)
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise CommError(what, why=f"the ranks' saves cannot meet: {first}") from error
        return found

    def _text(self, store: Store, j: int, what: str) -> str:
        key, until = self._key(self._round, j), time.monotonic() + self._seconds
        while not self._came(store, key):
            life = self._lives.get(j)
            ended = life is not None and life.ended()
            if (ended and not store.check([key])) or time.monotonic() > until:
                why = "has ended" if ended else f"has not come in {self._seconds:g} s"
                raise CommError(
                    what,
                    why=f"the process that writes the save of rank {j} {why}",
                    fix="look at the end of that rank",
                )
        host, pid, text = json.loads(store.get(key))
        if j not in self._lives and host == host_name():
            self._lives[j] = Life(pid)
        return text

    def _came(self, store: Store, key: str) -> bool:
        try:
            store.wait([key], timedelta(seconds=min(_LOOK_SECONDS, self._seconds)))
        except RuntimeError:  # too early, or a broken store
            return store.check([key])
        return True

    def leave(self) -> None:
        """End the save, successful or not; the first one removes its last texts once all have read them."""
        store = self._store
        if store is None:
            return
        with contextlib.suppress(RuntimeError):
            if not self.leads:
                store.set(self._key("left", self.position), "")
                return
            marks = [self._key("left", j) for j in range(1, self.size)]
            until = time.monotonic() + min(_LEAVE_SECONDS, self._seconds)
            while not store.check(marks) and time.monotonic() < until:
                time.sleep(0.01)
            for mark in marks:
                store.delete_key(mark)
            for j in range(self.size):
                self._forget(store, self._round, j)

    def _forget(self, store: Store, count: int, position: int) -> None:
        if count > 0:
            store.delete_key(self._key(count, position))

    def _key(self, count: int | str, position: int) -> str:
        return f"{self._name}/{count}/{position}"
