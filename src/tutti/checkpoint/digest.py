"""Checksums of files: sha256 of every 64 MB, so that threads and ranks can share a large file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tutti.remote_paths import is_remote

SEGMENT_NBYTES = 2**26
_READ_NBYTES = 2**20
_MOST_THREADS = 4


@dataclass(frozen=True)
class FileDigest:
    """The size of a file, and the sha256 of each segment; none if the save wrote no checksums."""

    nbytes: int
    sha256: tuple[str, ...]


def digest_of(file: Path) -> FileDigest:
    """The size and the checksums of `file`. Raises `OSError`."""
    nbytes = file.stat().st_size
    starts = range(0, nbytes, SEGMENT_NBYTES)
    return FileDigest(nbytes, tuple(_each(_segment, [(file, start) for start in starts])))


def find_damage(
    folder: Path, files: Mapping[str, FileDigest], *, share: int = 0, shares: int = 1
) -> str:
    """The damaged file of `folder`, and the damage; "" if there is none.

    Every caller compares all sizes. Of the segments it reads every `shares`-th, from the `share`-th on:
    ranks divide the work.
    """
    for name, saved in files.items():
        there = _nbytes(folder / name)
        if there != saved.nbytes:
            found = there if there is not None else "no"
            return f"{name} has {found} bytes of {saved.nbytes}: it is truncated or not there"
    segments = [(name, k) for name, saved in files.items() for k in range(len(saved.sha256))]
    mine = segments[share::shares]
    found = _each(_segment, [(folder / name, k * SEGMENT_NBYTES) for name, k in mine])
    for (name, k), sha256 in zip(mine, found, strict=True):
        if sha256 != files[name].sha256[k]:
            begin, end = k * SEGMENT_NBYTES, min((k + 1) * SEGMENT_NBYTES, files[name].nbytes)
            return f"{name} has another checksum: a bit between bytes {begin} and {end} changed"
    return ""


def _each(function: Callable[[Path, int], str], places: Sequence[tuple[Path, int]]) -> list[str]:
    if len(places) < 2:
        return [function(*place) for place in places]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda place: function(*place), places))


def _segment(file: Path, start: int) -> str:
    """The sha256 of one segment; hashing releases the GIL."""
    sha256, left = hashlib.sha256(), SEGMENT_NBYTES
    with file.open("rb") if is_remote(file) else open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while left and (piece := stream.read(min(_READ_NBYTES, left))):
            sha256.update(piece)
            left -= len(piece)
    return sha256.hexdigest()


def _nbytes(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None
