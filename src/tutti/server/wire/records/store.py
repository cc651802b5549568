"""A server's durable storage: receive buffers for pushes, a journal, snapshots.

    directory/
      server.json       what this server is, to refuse another one's files
      snapshot-7        the ledger after all of journal-6
      journal-7         records since
      segment-0 ...     the bytes of pushes; a journal names places in them

The server receives a push straight into a *slab* of a segment, a mapped file: its bytes outlive this process
before it writes their record. After a snapshot it reuses the slabs of older journals. With `fsync` a record
is on the disk before its answer, and outlives the machine; without, only the process. Without a directory
slabs are plain memory, and no records remain.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tutti.durable import sync_folder
from tutti.errors import ServerError
from tutti.server.protocol.ledger import Ledger, Record
from tutti.server.wire.connections.shortage import ShortError, records_short
from tutti.server.wire.records.journal import Entries, Journal
from tutti.server.wire.records.private import (
    make_private,
    open_private,
    write_private,
)
from tutti.server.wire.records.push_segments import ALIGNED, Segments, Slab
from tutti.server.wire.records.recovery import recovered
from tutti.server.wire.records.snapshot import Content, frozen

T = TypeVar("T")
_LOG_NBYTES = 2**30
_LEAST_SLABS = 4
_MOST_RECORDS = 20_000
# The format of the files; the store refuses any other.
_FORMAT = 2


class Store:
    """The records of one server.

    Args:
        directory: for the files, with access for its owner only; None: no files.
        slab_nbytes: room for the largest push.
        fsync: wait for the disk before a record counts as written.
        repair: continue from the records before damaged ones.

    Raises:
        ServerError: another process uses the directory, it holds other files than this server's records, or
            there is no room.
    """

    def __init__(
        self,
        directory: Path | None,
        slab_nbytes: int,
        *,
        fsync: bool = False,
        identity: dict[str, Any] | None = None,
        log_nbytes: int = _LOG_NBYTES,
        repair: bool = False,
    ) -> None:
        self.directory, self._fsync, self._repair = directory, fsync, repair
        self.segments = Segments(directory, slab_nbytes)
        self._most_slabs = max(_LEAST_SLABS, log_nbytes // self.segments.slab_nbytes)
        self._free: list[Slab] = []
        self._logged: set[int] = set()  # named by the journal that is open
        self._older: set[int] = set()  # named by journals that a snapshot under way will replace
        self._number, self._journal = 0, None
        self.goes_on = False  # from an earlier process's records
        self._thread: threading.Thread | None = None
        self._failed: ShortError | None = None
        self._lock = -1
        if directory is not None:
            self._kept(lambda: self._enter(directory, identity or {}))

    def _enter(self, directory: Path, identity: dict[str, Any]) -> None:
        if directory.exists():
            _refuse_foreign(directory)
        make_private(directory)
        self._lock = _lock(directory)
        try:
            _check_identity(directory, {"format": _FORMAT, **identity}, fsync=self._fsync)
            self.segments.open()
        except BaseException:
            self.close()
            raise

    def slab(self) -> Slab:
        """A slab for a push.

        Raises:
            ShortError: there is no room.
        """
        if not self._free:
            self._free += self._kept(self.segments.grow)
        slab = self._free.pop()
        slab.clear()
        return slab

    def release(self, slab: Slab, ledger: Ledger) -> None:
        """Release a handled push: its slab stays in use as long as the journal or the ledger needs it."""
        if self.directory is not None:
            if slab.number not in self._logged:
                self._free.append(slab)
            return
        slab.waits = True
        needed = _needed(self.segments, ledger)
        for old in self.segments.slabs:
            if old.waits and old.number not in needed:
                old.waits = False
                self._free.append(old)

    def write(self, record: Record) -> None:
        """Write a record; when this returns, it outlives the process (with `fsync`, the machine).

        Raises:
            ShortError: there is no room.
        """
        journal = self._journal
        if journal is not None:
            if self._failed:
                raise self._failed
            self._logged |= self._kept(lambda: journal.write(record, self.segments))

    def begin(self, ledger: Ledger) -> list[Record]:
        """Restore the ledger from an earlier process's snapshot; returns the records since.

        Raises:
            DamageError: a file is damaged.
        """
        directory, repair = self.directory, self._repair
        if directory is None:
            return []
        self._number, found = self._kept(
            lambda: recovered(directory, ledger, self.segments, repair=repair)
        )
        self.goes_on = self._number > 0
        return found

    def start(self, ledger: Ledger) -> None:
        """Write a snapshot of the current ledger, and every record from now on.

        Raises:
            ShortError: there is no room.
        """
        if self.directory is not None:
            self._kept(lambda: self._snapshot(ledger, wait=True))

    def due(self) -> bool:
        """Whether the journal has become long.

        During a snapshot it may become twice as long; then the server waits for that snapshot, so that the
        records do not grow without limit on a slow disk.
        """
        if self._journal is None:
            return False
        under_way = self._thread is not None and self._thread.is_alive()
        times = 2 if under_way else 1
        long = len(self._logged) >= times * self._most_slabs
        return long or self._journal.num_records >= times * _MOST_RECORDS

    def snapshot(self, ledger: Ledger) -> None:
        """Begin a snapshot of the current ledger; a thread writes it.

        Raises:
            ShortError: there is no room.
        """
        self._kept(lambda: self._snapshot(ledger, wait=False))

    def close(self) -> None:
        """Wait for the current snapshot, and unlock the directory."""
        if self._thread is not None:
            self._thread.join()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _kept(self, action: Callable[[], T]) -> T:
        """The result of `action` on the files; its error names the lacking resource."""
        assert self.directory is not None or self.segments.directory is None
        try:
            return action()
        except OSError as error:
            raise records_short(self.directory or Path("memory"), error) from error

    def _snapshot(self, ledger: Ledger, *, wait: bool) -> None:
        assert self.directory is not None
        if self._thread is not None:
            self._thread.join()
        if self._failed:
            raise self._failed
        number = self._number + 1
        journal = Journal(self.directory / f"journal-{number}", number, fsync=self._fsync)
        if self._fsync:
            sync_folder(self.directory)
        if self._journal is not None:
            self._journal.end(number)
            self._journal.close()
        self._number, self._journal = number, journal
        pending = _needed(self.segments, ledger)
        self._older, self._logged = self._logged, pending
        content = frozen(ledger, self.segments, copy=not wait)
        if wait:
            self._finish(number, content)
            taken = self._logged | {slab.number for slab in self._free}
            self._free += [slab for slab in self.segments.slabs if slab.number not in taken]
            return
        unused = self._older - pending
        self._thread = threading.Thread(
            target=self._in_background, args=(number, content, unused), daemon=True
        )
        self._thread.start()

    def _in_background(self, number: int, content: Content, unused: set[int]) -> None:
        try:
            self._kept(lambda: self._finish(number, content))
        except ShortError as error:  # told at the next record
            self._failed = error
            return
        self._free += [self.segments.slabs[k] for k in sorted(unused)]

    def _finish(self, number: int, content: Content) -> None:
        """Write a snapshot, then delete the files that it replaces."""
        assert self.directory is not None
        path = self.directory / f"snapshot-{number}"
        entries = Entries(path.with_suffix(".new"), number, fsync=False)
        try:
            for item in content:
                entries.write(*item)
            if self._fsync:
                entries.sync()
        finally:
            entries.close()
        path.with_suffix(".new").rename(path)
        if self._fsync:
            sync_folder(self.directory)
        for old in self.directory.iterdir():
            kind, _, text = old.name.partition("-")
            if kind in ("snapshot", "journal") and text.isdigit() and int(text) < number:
                old.unlink()


def _needed(segments: Segments, ledger: Ledger) -> set[int]:
    """The slabs of pushes not applied yet."""
    parts = (
        part
        for pushes in ledger.pending.values()
        for push in pushes.values()
        for part in push.parts.values()
    )
    found = (segments.find(x) for part in parts for x in (part.values, part.rows) if x is not None)
    return {place[0].number for place in found if place is not None}


def _lock(directory: Path) -> int:
    fd = open_private(directory / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ServerError(
            "another server uses this directory",
            at=str(directory),
            fix="a directory of its own for each server",
        ) from error
    return fd


def _refuse_foreign(directory: Path) -> None:
    """The store makes a directory private only if it is empty or holds a server's records."""
    names = {p.name for p in directory.iterdir()} if directory.is_dir() else {directory.name}
    if names - {"lock", "server.json.new", "lost+found"} and "server.json" not in names:
        raise ServerError(
            "this is no directory of a server's records",
            at=str(directory),
            why=f"it has {sorted(names)[0]}, and no server.json",
            fix="an empty directory, or one that does not exist yet",
        )


def _check_identity(directory: Path, identity: dict[str, Any], *, fsync: bool) -> None:
    path = directory / "server.json"
    text = json.dumps(identity, sort_keys=True, indent=1)
    if not path.exists():
        write_private(path, text, fsync=fsync)
        return
    with suppress(UnicodeDecodeError):
        if path.read_text() == text:
            return
    raise ServerError(
        "these are the records of another server",
        at=str(directory),
        why=f"they are of {path.read_text(errors='replace')}, and this is {text}",
        fix="the directory that this server wrote, or an empty one",
    )


def room(nbytes: int, num_parts: int) -> int:
    """Bytes of a slab for parts of `nbytes` in all: each begins at a multiple of 64."""
    return nbytes + ALIGNED * (num_parts + 1)
