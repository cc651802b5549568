"""What the machine lacks for workers of a loader: shared memory, descriptors, processes."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tutti.errors import TuttiError

# PyTorch gives the number of the system's error at the end of its text.
_OF_SHARED_MEMORY = re.compile(r"shared memory.*\((\d+)\)$", re.DOTALL)
# Of Python, where a message should carry a descriptor and there is none left for it.
_NO_DESCRIPTOR_CAME = re.compile(r"received \d+ items of ancdata")
# Of PyTorch, where a process has fewer than `_SPARE` descriptors left for a batch.
_FEW_DESCRIPTORS = re.compile(r"Too many open files\.")
_OF_WORKER, _OF_LOADER, _SPARE = 4, 2, 10  # descriptors
_NO_WORKERS = "or num_workers=0"


def lacking(error: BaseException) -> TuttiError | None:
    """The error that says which limit a worker's start, or its batch, has met; None for another error."""
    number = _number(error)
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        why, fix = "a process has no file descriptors left", f"raise `ulimit -n` (now {limit})"
    elif number == errno.EAGAIN:
        why = "this user, or this container, may have no more processes and threads"
        fix = "raise `ulimit -u`, or the container's limit of processes"
    elif number in (errno.ENOSPC, errno.ENOMEM):
        why, fix = "no room in /dev/shm", "a larger /dev/shm (docker run --shm-size)"
    elif number in (errno.EROFS, errno.EACCES, errno.ENOENT):
        why, fix = f"workers cannot use /dev/shm: {os.strerror(number)}", "mount it for writing"
    else:
        return None
    what = "the loader has too little of this machine for its workers"
    return TuttiError(what, why=why, fix=f"{fix}, {_NO_WORKERS}")


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    text = str(error)
    if _NO_DESCRIPTOR_CAME.search(text) or _FEW_DESCRIPTORS.match(text):
        return errno.EMFILE
    found = _OF_SHARED_MEMORY.search(text) if isinstance(error, RuntimeError) else None
    return int(found[1]) if found else None


def check_descriptors(num_workers: int) -> None:
    """Raise `OSError` if workers could start, but not send their batches.

    Then threads of Python's multiprocessing print tracebacks without end, in every worker.
    """
    needed = _OF_LOADER + _OF_WORKER * num_workers + _SPARE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_workers and limit != resource.RLIM_INFINITY and _num_open() + needed > limit:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # without that of the list itself


@contextmanager
def within_limits() -> Iterator[None]:
    """Context of what workers need from the machine. Raises `TuttiError` for a limit of `lacking`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (found := lacking(error)) is None:
            raise
        raise found from error
