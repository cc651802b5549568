"""A machine that has too little for workers: one error names what is short, and how to do without."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

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


_FEW = "Too many open files. Communication with the workers is no longer possible. Please increase the limit"


@pytest.mark.parametrize(
    "error",
    [OSError(24, "x"), RuntimeError("received 0 items of ancdata"), RuntimeError(_FEW)],
)
def test_a_batch_for_which_there_is_no_descriptor_is_one_too(error: Exception) -> None:
    class Source:
        def __next__(self) -> None:
            raise error

    reader = tutti.loader(Numbers(8), 2)._reader
    answer = OwnReads(Source(), reader).next()  # type: ignore[arg-type]
    assert answer is not None
    with pytest.raises(TuttiError, match=r"(?s)for its workers\n.*ulimit -n"):
        answer["failure"].throw()


_LIMITED = """
import os, resource, tutti

def main():
    used = len(os.listdir("/proc/self/fd")) - 1
    soft = used + 2 + 4 * 2 + {spare}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    for _ in range({loops}):
        for batch in loader:
            pass
    print("done")

loader = tutti.loader(list(range(8)), 2, num_workers=2, persistent_workers=True)
main()
"""


@pytest.mark.parametrize("spare", range(0, 10, 3))
def test_descriptors_for_the_start_of_workers_alone_are_too_few(spare: int) -> None:
    """Workers would start, and print tracebacks of Python's multiprocessing for each batch."""
    words = [sys.executable, "-c", _LIMITED.format(spare=spare, loops=1)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.stderr.count("OSError: [Errno 24] Too many open files") == 1, ended.stderr
    assert f"{WHAT}\n  why  a process has no file descriptors left" in ended.stderr
    assert "_serve" not in ended.stderr


def test_workers_that_stay_need_no_more_descriptors() -> None:
    """The second loop begins with those that the first one has used."""
    words = [sys.executable, "-c", _LIMITED.format(spare=14, loops=3)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_a_run_without_descriptors_for_workers_reports_one_error(tmp_path: Path) -> None:
    """A rank keeps descriptors for its end: nothing stands beside its error."""
    (tmp_path / "train.py").write_text(
        "import torch, tutti\n"
        "model = torch.nn.Linear(2, 2)\n"
        "print(next(iter(tutti.loader(torch.zeros(8, 2), 2, num_workers=2))))\n"
    )
    run = f"ulimit -n 22; exec {sys.executable} -m tutti run -n 2 train.py"
    ended = subprocess.run(
        ["sh", "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("Traceback") == 0, ended.stderr
    assert ended.stderr.count(WHAT) == 1
