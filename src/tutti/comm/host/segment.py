"""Memory that the ranks of one host share.

A segment is an unnamed file on the shared-memory filesystem: the ranks map it through the open descriptor
of its creator. So it leaves nothing behind however the ranks end, and only processes of the same user can
open it. The creator allocates all pages at once: a full filesystem then raises an error, instead of killing
a rank at a later write.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tutti.comm.host.hosts import host_name
from tutti.environment import SHARED_MEMORY
from tutti.quantities import format_nbytes

T = TypeVar("T")


# Each rank gives a text and gets those of all ranks of the group, in its order.
Exchange = Callable[[str], list[str]]


class SharedMemoryError(RuntimeError):
    """The ranks cannot share memory; the text says why. Every rank of the group raises it."""


def directory() -> Path | None:
    """The shared-memory filesystem; None if it is switched off."""
    name = SHARED_MEMORY.read()
    return None if name == "off" else Path(name)


def memory_host(rank: int) -> str:
    """A text that is equal on ranks that may share memory; that of a rank that shares none is its own."""
    return f"rank {rank}" if directory() is None else host_name()


def make_segment(
    nbytes: int, position: int, exchange: Exchange, *, at_once: bool = False
) -> Tensor:
    """`nbytes` of zeros that all ranks of the group share, as bytes (uint8, 1-D).

    The group's first rank makes the file, the others map it. All ranks call this together. `at_once`
    maps every page here, instead of at its first access.

    Raises:
        SharedMemoryError: on every rank, if it failed on one.
    """
    fd, found, problem = -1, None, ""
    if position == 0:
        fd, problem = tried(lambda: new_file(nbytes), -1, nbytes)
    try:
        offer = json.dumps({"pid": os.getpid(), "fd": fd, "problem": problem})
        lead = json.loads(exchange(offer)[0])
        problem = lead["problem"]
        if not problem:
            pid, at = lead["pid"], lead["fd"]
            found, problem = tried(lambda: map_file(pid, at, nbytes, at_once), None, nbytes)
        problems = [p for p in exchange(problem) if p]  # all have mapped it, or given up
    finally:
        if fd >= 0:
            os.close(fd)
    if problems:
        raise SharedMemoryError(problems[0])
    assert found is not None
    return found


def new_file(nbytes: int) -> int:
    """The descriptor of a new unnamed file of zeros, which only this user may open.

    Raises:
        OSError: the directory is missing, full, or on a filesystem without unnamed files.
    """
    where = directory()
    if where is None:
        raise OSError(0, f"{SHARED_MEMORY.name}=off")
    fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_file(pid: int, fd: int, nbytes: int, at_once: bool = False, inode: int = 0) -> Tensor:
    """The file that process `pid` has open as `fd`, as bytes (uint8, 1-D); see `make_segment`.

    Args:
        pid: the process.
        fd: its descriptor.
        nbytes: the file's size.
        at_once: map every page here.
        inode: the file's, if the process may have closed it and opened another one.

    Raises:
        OSError: the process has gone, is another user's, has closed the file, or there is no memory for
            page tables.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
    try:
        if inode and os.fstat(own).st_ino != inode:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if sys.version_info >= (3, 13):  # else a descriptor stays open as long as the memory
            found = mmap.mmap(own, nbytes, flags=flags, trackfd=False)
        else:
            found = mmap.mmap(own, nbytes, flags=flags)
    finally:
        os.close(own)
    return torch.frombuffer(found, dtype=torch.uint8)


def _said(error: OSError, nbytes: int) -> str:
    """The problem with the directory, in a few words."""
    where = directory()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
        return f"{where}: {format_nbytes(nbytes)} are more than ulimit -f allows ({format_nbytes(most)})"
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
        return f"{where} has no room for {format_nbytes(nbytes)}"
    return f"{where}: {error.strerror or error}"


def tried(make: Callable[[], T], otherwise: T, nbytes: int) -> tuple[T, str]:
    """The result of `make` and "", or `otherwise` and the problem."""
    try:
        return make(), ""
    except OSError as error:
        return otherwise, _said(error, nbytes)
