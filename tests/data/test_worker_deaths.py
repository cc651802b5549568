"""A worker's death is told where the loop waits for a batch, not in whatever the program does meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import forked
import tutti
from small_datasets import Numbers

SCRIPT = """\\
import tutti

if __name__ == "__main__":
    loader = tutti.loader(list(range(32)), 2, num_workers=2, persistent_workers=True)
    loop = iter(loader)
    print(next(loop).tolist(), flush=True)
"""


class Fatal(Numbers):
    """Sample 3 ends its process."""

    def __getitem__(self, i: int) -> Tensor:
        if i == 3:
            time.sleep(0.3)  # the batches before have arrived
            os._exit(9)
        return super().__getitem__(i)


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The signals of children that a handler of the program's own has seen."""
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGCHLD, before)


def work_until(ended: Any) -> None:
    """Plain Python, at any line of which a handler may run."""
    until = time.monotonic() + 20
    while not ended():
        assert time.monotonic() < until
        sum(range(1000))
    for _ in range(1000):
        sum(range(100))


def test_the_program_between_two_batches_is_left_alone() -> None:
    loader = tutti.loader(Fatal(8), 2, num_workers=1, prefetch_factor=2)
    loop = iter(loader)
    assert next(loop).tolist() == [[0], [1]]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    workers = [int(x) for x in children.read_text().split()]
    work_until(lambda: any(_has_ended(pid) for pid in workers))
    with pytest.raises(tutti.TuttiError, match="died while it read sample 3 of Fatal"):
        next(loop)
    assert next(iter(tutti.loader([1, 2], 2, num_workers=1))).tolist() == [1, 2]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_handler_of_the_programs_own_is_called(noted: list[int]) -> None:
    loader = tutti.loader(Fatal(8), 2, num_workers=1)
    loop = iter(loader)
    next(loop)
    work_until(lambda: noted)
    with pytest.raises(tutti.TuttiError, match="died while it read"):
        next(loop)


def test_the_end_of_a_process_in_mid_epoch_prints_nothing(tmp_path: Path) -> None:
    path = tmp_path / "read.py"
    path.write_text(SCRIPT)
    done = forked.run([str(path)], env=dict(os.environ), cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 1]")
    assert "Traceback" not in done.stderr, done.stderr
