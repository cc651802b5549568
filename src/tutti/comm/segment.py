"""Memory that the ranks of one host share.

A segment is a file without a name on the shared-memory filesystem: the ranks map it through the open
descriptor of the one that made it. So nothing is left behind however the ranks end, and only processes
of the same user can look at it. Its pages are taken when it is made: a full filesystem says so then,
instead of killing a rank later that writes to it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Where segments are made; "off" leaves all ranks to torch.distributed.
DIRECTORY = "TUTTI_SHARED_MEMORY"
DEFAULT_DIRECTORY = "/dev/shm"

# Each rank gives a text and gets those of all ranks of the group, in its order.
Exchange = Callable[[str], list[str]]


class SharedMemoryError(RuntimeError):
    """No memory can be shared; the text says why. Every rank of the group gets it."""


def directory() -> Path | None:
    """The shared-memory filesystem to use; None where it is switched off."""
    name = os.environ.get(DIRECTORY) or DEFAULT_DIRECTORY
    return None if name == "off" else Path(name)


def make_segment(nbytes: int, position: int, exchange: Exchange) -> Tensor:
    """`nbytes` of zeros that all ranks of the group share, as bytes (uint8, 1-D).

    The group's first rank makes the file, the others map it. All ranks call this together.

    Raises:
        SharedMemoryError: on every rank, if it failed on one.
    """
    fd, found, problem = -1, None, ""
    if position == 0:
        try:
            fd = _new_file(nbytes)
        except OSError as error:
            problem = _said(error, nbytes)
    offer = json.dumps({"pid": os.getpid(), "fd": fd, "problem": problem})
    lead = json.loads(exchange(offer)[0])
    problem = lead["problem"]
    if not problem:
        try:
            found = _mapped(lead["pid"], lead["fd"], nbytes)
        except OSError as error:
            problem = _said(error, nbytes)
    problems = [p for p in exchange(problem) if p]  # all have mapped it, or given up
    if fd >= 0:
        os.close(fd)
    if problems:
        raise SharedMemoryError(problems[0])
    assert found is not None
    return torch.frombuffer(found, dtype=torch.uint8)


def _new_file(nbytes: int) -> int:
    where = directory()
    if where is None:
        raise OSError(0, f"{DIRECTORY}=off")
    fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _mapped(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)


def _said(error: OSError, nbytes: int) -> str:
    where = directory()
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return f"{where} has no room for {nbytes / 1e6:.1f} MB"
    return f"{where}: {error.strerror or error}"
