"""A machine that has too little for workers: one error names what is short, and how to do without."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys

import pytest

import tutti
from small_datasets import Numbers
from tutti.data.own_reads import OwnReads
from tutti.errors import TuttiError

TRAIN = "import tutti; print(next(iter(tutti.loader(list(range(8)), 2, num_workers=2))))"
WHAT = "TuttiError: the loader has too little of this machine for its workers"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ro", "workers cannot use /dev/shm: Read-only file system"),
        ("size=16k", "no room in /dev/shm"),
    ],
)
def test_a_shared_memory_that_workers_cannot_use_is_named(options: str, why: str) -> None:
    """In a mount namespace of its own, as a container has one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("cannot make a mount namespace here")
    mount = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    words = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", TRAIN]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert f"{WHAT}\n  why  {why}\n  fix  " in ended.stderr, ended.stderr
    assert ended.stderr.rstrip().endswith("or num_workers=0")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_of_descriptors_is_named() -> None:
    loader = tutti.loader(Numbers(8), 2, num_workers=2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, before[1]))
    try:
        with pytest.raises(
            TuttiError, match=r"(?s)^the loader has too .*`ulimit -n` \(now 8\), or num"
        ):
            iter(loader).__next__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("error", [OSError(24, "x"), RuntimeError("received 0 items of ancdata")])
def test_a_batch_for_which_there_is_no_descriptor_is_one_too(error: Exception) -> None:
    class Source:
        def __next__(self) -> None:
            raise error

    reader = tutti.loader(Numbers(8), 2)._reader
    answer = OwnReads(Source(), reader).next()  # type: ignore[arg-type]
    assert answer is not None
    with pytest.raises(TuttiError, match=r"(?s)for its workers\n.*ulimit -n"):
        answer["failure"].throw()
