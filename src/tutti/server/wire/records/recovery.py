"""Recovers an earlier process's state: the latest snapshot, and the records of all journals since.

Journals follow each other without a gap. Each but the last ends with an entry that names the next one, which
reveals a missing or truncated file. Recovery refuses damage. With `repair` it takes the records before the
damage, and keeps copies of the damaged journal and of all later ones as `journal-7.damaged`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tutti.errors import ServerError
from tutti.server.protocol.ledger import Ledger, Record
from tutti.server.wire.records.journal import (
    HEAD_NBYTES,
    MAGIC,
    NEXT,
    DamageError,
    Head,
    read_entries,
    record_of,
)
from tutti.server.wire.records.private import open_private
from tutti.server.wire.records.push_segments import Segments
from tutti.server.wire.records.snapshot import restore

_LOG = logging.getLogger("tutti.server")
_SUFFIX = ".damaged"


def recovered(
    directory: Path, ledger: Ledger, segments: Segments, *, repair: bool
) -> tuple[int, list[Record]]:
    """Set `ledger` to the snapshot; the number of the last file, and the records since the snapshot.

    Raises:
        DamageError: a file is damaged, and `repair` is not set or does not help.
    """
    snapshots, journals = numbered(directory, "snapshot"), numbered(directory, "journal")
    found: list[Record] = []
    if snapshots:
        restore(directory / f"snapshot-{snapshots[-1]}", snapshots[-1], ledger, segments)
    try:
        for record in _records(directory, snapshots, journals, segments):
            found.append(record)
    except DamageError as damage:
        if not repair or not snapshots:
            raise
        _set_aside(directory, damage)
    return max([0, *snapshots, *journals]), found


def numbered(directory: Path, kind: str) -> list[int]:
    """The numbers of the files `kind-N`, ascending."""
    names = (p.name.partition("-") for p in directory.iterdir())
    return sorted(int(n) for name, _, n in names if name == kind and n.isdigit())


def _records(
    directory: Path, snapshots: list[int], journals: list[int], segments: Segments
) -> Iterator[Record]:
    """The records of all journals since the last snapshot."""
    if not snapshots:
        _refuse_orphans(directory, journals)
        return
    open_end: Path | None = None  # a journal without an end entry: only empty ones may follow
    following, last = snapshots[-1], max([snapshots[-1], *journals])
    for number in range(following, last + 1):
        path, ended = directory / f"journal-{number}", False
        if number not in journals:
            raise DamageError(path, 0, "the file is missing")
        for found in read_entries(path, number):
            if open_end is not None:
                raise _cut(open_end, path)
            if ended:
                what = "the file continues after its last entry"
                raise DamageError(path, found.offset, what, found.position)
            ended = NEXT in found.text
            if not ended:
                yield record_of(found, path, segments)
        following = number + 1
        open_end = open_end or (None if ended else path)
    if open_end is None:
        path = directory / f"journal-{following}"
        raise DamageError(path, 0, f"the file is missing: journal-{following - 1} goes on there")


def _refuse_orphans(directory: Path, journals: list[int]) -> None:
    """A server that ended before its first snapshot has answered no request: it left empty journals."""
    for number in journals:
        path = directory / f"journal-{number}"
        if path.stat().st_size:
            raise ServerError(
                "the records of this server have no snapshot to begin with",
                at=str(path),
                why="a journal has records, and no snapshot-N is there",
                fix="bring the file back; or begin anew from a checkpoint, with an empty directory",
            )


def _cut(path: Path, later: Path) -> DamageError:
    size = path.stat().st_size
    return DamageError(path, size, f"the file was cut off there: {later.name} has later records")


def _set_aside(directory: Path, damage: DamageError) -> None:
    """Copy the damaged journal and later ones; reports their least number of records."""
    first, lost = int(damage.path.name.partition("-")[2]), 0
    for number in [n for n in numbered(directory, "journal") if n >= first]:
        path = directory / f"journal-{number}"
        lost += _count(path, damage.position if number == first else 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        aside = open_private(path.with_name(path.name + _SUFFIX), flags)
        with open(path, "rb") as source, open(aside, "wb") as copy:
            shutil.copyfileobj(source, copy)
    _LOG.warning(
        "%s\n  the records before are kept; at least %d records from there on are not; the journals are "
        "copied to %s/journal-*%s",
        damage.what,
        lost,
        directory,
        _SUFFIX,
    )


def _count(path: Path, since: int) -> int:
    """The number of a file's entries from position `since` on, as far as it has readable heads."""
    raw, at, count = path.read_bytes(), 0, 0
    while (at := raw.find(MAGIC, at)) >= 0:
        head = Head.unpack(raw[at : at + HEAD_NBYTES]) if len(raw) - at >= HEAD_NBYTES else None
        count = max(count, head.position + 1 - since) if head is not None else count
        at += len(MAGIC)
    return count
