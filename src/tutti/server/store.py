"""Where a server's records are kept: memory that pushes are received into, a journal, snapshots.

    directory/
      server.json       what this server is, to refuse another one's files
      snapshot-7        the ledger after all of journal-6
      journal-7         records since
      slab-0 ...        the bytes of pushes; a journal names places in them

A push is received straight into a *slab*, a file that is mapped: its bytes are in the kernel's hands, and
outlive this process, before its record is written. After a snapshot the slabs that older journals name are
used again. With `fsync` a record is also on the disk before it is answered, and outlives the machine;
without, only the process. Without a directory slabs are plain memory and nothing is kept.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tutti.errors import ServerError
from tutti.server.journal import Journal, Slab, records, write_entry
from tutti.server.ledger import Ledger, Record
from tutti.server.snapshot import frozen, restore

_LOG_NBYTES = 2**30
_LEAST_SLABS = 4
_MOST_RECORDS = 20_000


class Store:
    """The records of one server.

    Args:
        directory: where they are kept; None: nowhere.
        slab_nbytes: room for the largest push.
        fsync: wait for the disk before a record counts as written.

    Raises:
        ServerError: another process uses the directory, or it holds another server's records.
    """

    def __init__(
        self,
        directory: Path | None,
        slab_nbytes: int,
        *,
        fsync: bool = False,
        identity: dict[str, Any] | None = None,
        log_nbytes: int = _LOG_NBYTES,
    ) -> None:
        self.directory, self._fsync = directory, fsync
        self._slab_nbytes = max(1, slab_nbytes)
        self._most_slabs = max(_LEAST_SLABS, log_nbytes // self._slab_nbytes)
        self._slabs: list[Slab] = []
        self._free: list[Slab] = []
        self._logged: set[int] = set()  # named by the journal that is open
        self._older: set[int] = set()  # named by journals that a snapshot under way will replace
        self._number, self._journal = 0, None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory)
            _check_identity(directory, identity or {})
            self._open_slabs(directory)

    def slab(self) -> Slab:
        """Room for a push."""
        if not self._free:
            self._free.append(self._new_slab(len(self._slabs)))
        slab = self._free.pop()
        slab.used = 0
        return slab

    def release(self, slab: Slab, ledger: Ledger) -> None:
        """The push in `slab` has been dealt with: it stays as long as the journal or the ledger needs it."""
        if self.directory is not None:
            if slab.number not in self._logged:
                self._free.append(slab)
            return
        slab.waits = True
        needed = _needed(self._slabs, ledger)
        for old in self._slabs:
            if old.waits and old.number not in needed:
                old.waits = False
                self._free.append(old)

    def write(self, record: Record) -> None:
        """Keep a record; when this returns it outlives the process (with `fsync`, the machine).

        Raises:
            OSError: there is no room.
        """
        if self._journal is not None:
            if self._failed:
                raise ServerError("a snapshot could not be written") from self._failed
            self._logged |= self._journal.write(record, self._slabs)

    def begin(self, ledger: Ledger) -> list[Record]:
        """Read what an earlier process left: the ledger is changed, and the records that follow are returned.

        Raises:
            ServerError: what is there is damaged.
        """
        if self.directory is None:
            return []
        numbers = sorted(
            int(p.name.partition("-")[2]) for p in self.directory.glob("snapshot-*[0-9]")
        )
        if not numbers:
            return []
        self._number = numbers[-1]
        restore(self.directory / f"snapshot-{self._number}", ledger, self._slabs)
        found: list[Record] = []
        for number in self._journals(self._number):
            found += records(self.directory / f"journal-{number}", self._slabs)
            self._number = number
        return found

    def start(self, ledger: Ledger) -> None:
        """Write down the ledger as it is now, and every record from here on."""
        if self.directory is not None:
            self._snapshot(ledger, wait=True)

    def due(self) -> bool:
        """Whether the journal has become long."""
        if self._journal is None or (self._thread is not None and self._thread.is_alive()):
            return False
        return len(self._logged) >= self._most_slabs or self._journal.num_records >= _MOST_RECORDS

    def snapshot(self, ledger: Ledger) -> None:
        """Begin a snapshot of the ledger as it is now; a thread writes it."""
        self._snapshot(ledger, wait=False)

    def close(self) -> None:
        """Wait for the snapshot under way, and leave the directory to others."""
        if self._thread is not None:
            self._thread.join()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self.directory is not None:
            os.close(self._lock)

    def _snapshot(self, ledger: Ledger, *, wait: bool) -> None:
        assert self.directory is not None
        if self._thread is not None:
            self._thread.join()
        if self._journal is not None:
            self._journal.close()
        self._number += 1
        pending = _needed(self._slabs, ledger)
        self._older, self._logged = self._logged, pending
        self._journal = Journal(self.directory / f"journal-{self._number}", fsync=self._fsync)
        content = frozen(ledger, self._slabs, copy=not wait)
        if wait:
            self._finish(self._number, content)
            taken = self._logged | {slab.number for slab in self._free}
            self._free += [slab for slab in self._slabs if slab.number not in taken]
            return
        unused = self._older - pending
        self._thread = threading.Thread(
            target=self._in_background, args=(self._number, content, unused), daemon=True
        )
        self._thread.start()

    def _in_background(self, number: int, content: list[Any], unused: set[int]) -> None:
        try:
            self._finish(number, content)
        except BaseException as error:  # told at the next record
            self._failed = error
            return
        self._free += [self._slabs[k] for k in sorted(unused)]

    def _finish(self, number: int, content: list[Any]) -> None:
        """Write a snapshot, then forget what it replaces."""
        assert self.directory is not None
        path = self.directory / f"snapshot-{number}"
        with open(path.with_suffix(".new"), "wb") as file:
            for item in content:
                write_entry(file, *item)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        path.with_suffix(".new").rename(path)
        if self._fsync:
            _sync_directory(self.directory)
        for old in self.directory.iterdir():
            kind, _, text = old.name.partition("-")
            if kind in ("snapshot", "journal") and text.isdigit() and int(text) < number:
                old.unlink()

    def _journals(self, first: int) -> Iterator[int]:
        assert self.directory is not None
        while (self.directory / f"journal-{first}").exists():
            yield first
            first += 1

    def _open_slabs(self, directory: Path) -> None:
        while (directory / f"slab-{len(self._slabs)}").exists():
            self._new_slab(len(self._slabs))

    def _new_slab(self, number: int) -> Slab:
        if self.directory is None:
            memory, mapping = torch.empty(self._slab_nbytes, dtype=torch.uint8), None
        else:
            mapping = _mapped(self.directory / f"slab-{number}", self._slab_nbytes)
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._slabs.append(Slab(number, memory, mapping))
        return self._slabs[-1]


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    """A file's bytes, all of which have their place on the disk: a full one says so here."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        nbytes = max(nbytes, os.fstat(fd).st_size)
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)


def _needed(slabs: list[Slab], ledger: Ledger) -> set[int]:
    """The slabs that pushes lie in which are not applied yet."""
    parts = (
        part
        for pushes in ledger.pending.values()
        for push in pushes.values()
        for part in push.parts.values()
    )
    starts = [part.values.data_ptr() for part in parts if part.values.numel()]
    return {slab.number for slab in slabs if any(slab.holds(start) for start in starts)}


def _lock(directory: Path) -> int:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def _check_identity(directory: Path, identity: dict[str, Any]) -> None:
    path = directory / "server.json"
    text = json.dumps(identity, sort_keys=True, indent=1)
    if not path.exists():
        path.with_suffix(".new").write_text(text)  # this process may end while it writes
        path.with_suffix(".new").rename(path)
    elif path.read_text() != text:
        raise ServerError(
            "these are the records of another server",
            at=str(directory),
            why=f"they are of {path.read_text()}, and this is {text}",
            fix="the directory that this server wrote, or an empty one",
        )


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def room(nbytes: int, num_parts: int) -> int:
    """Bytes of a slab for parts of `nbytes` in all: each begins at a multiple of 64."""
    return nbytes + 64 * (num_parts + 1)
