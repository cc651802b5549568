"""Memory that several processes map: made once, without a name, and no trouble where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from thread_exchange import exchange_of
from tutti.comm.host import segment
from tutti.comm.host.segment import SharedMemoryError, directory, make_segment, map_file, new_file
from tutti.environment import SHARED_MEMORY

FDS = Path("/proc/self/fd")


def made(n: int, nbytes: int) -> list[Tensor | SharedMemoryError]:
    results: list[Tensor | SharedMemoryError | None] = [None] * n

    def make(position: int, exchange: Callable[[str], list[str]]) -> None:
        try:
            results[position] = make_segment(nbytes, position, exchange)
        except SharedMemoryError as error:
            results[position] = error

    threads = [threading.Thread(target=make, args=(i, e)) for i, e in enumerate(exchange_of(n))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


def test_all_see_what_one_writes() -> None:
    views = made(3, 10_000)
    assert len(views) == 3
    tensors = [view for view in views if isinstance(view, Tensor)]
    assert len({view.data_ptr() for view in tensors}) == 3, "mapped three times"
    assert all(view.shape == (10_000,) and not view.any() for view in tensors)
    tensors[1][77] = 5
    assert [int(view[77]) for view in tensors] == [5] * 3


def test_it_has_no_name_and_is_this_users_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_MEMORY.name, str(tmp_path))
    fd = new_file(5000)
    try:
        stat = os.fstat(fd)
        assert (stat.st_mode & 0o777, stat.st_nlink, stat.st_size) == (0o600, 0, 5000)
        assert stat.st_blocks * 512 >= 5000, "its pages are taken"
        assert list(tmp_path.iterdir()) == [] and not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_another_process_maps_it_through_the_descriptor() -> None:
    fd = new_file(4096)
    code = (
        f"from tutti.comm.host.segment import map_file; map_file({os.getpid()}, {fd}, 4096)[3] = 9"
    )
    try:
        subprocess.run([sys.executable, "-c", code], check=True)
        assert int(map_file(os.getpid(), fd, 4096, at_once=True)[3]) == 9
    finally:
        os.close(fd)


def test_no_descriptor_is_left_when_the_memory_is_gone() -> None:
    before = len(list(FDS.iterdir()))
    views = made(2, 4096)
    del views
    assert len(list(FDS.iterdir())) == before


@pytest.mark.parametrize("problem", ["missing", "no such files", "off"])
def test_every_rank_gets_the_same_reason(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"missing": str(tmp_path / "none"), "no such files": "/proc", "off": "off"}[problem]
    monkeypatch.setenv(SHARED_MEMORY.name, where)
    before = len(list(FDS.iterdir()))
    errors = made(3, 4096)
    assert len(errors) == 3 and all(isinstance(error, SharedMemoryError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert where in str(errors[0]) if problem != "off" else "off" in str(errors[0])
    assert len(list(FDS.iterdir())) == before


def test_one_rank_that_cannot_map_it_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([True, False, True])
    whole = segment.map_file

    def sometimes(pid: int, fd: int, nbytes: int, at_once: bool = False) -> Tensor:
        if next(calls):
            return whole(pid, fd, nbytes, at_once)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(segment, "map_file", sometimes)
    assert [str(error) for error in made(3, 4096)] == [f"{directory()}: Permission denied"] * 3


def test_too_large_a_file_is_said_with_its_size(tmp_path: Path) -> None:
    """The limit on the size of files stands in for a full filesystem; it holds for a process."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "from tutti.comm.host.segment import make_segment\n"
        "try: make_segment(2**21, 0, lambda text: [text])\n"
        "except RuntimeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"{directory()}: 2.1 MB are more than ulimit -f allows (1.05 MB)"


def test_views_of_every_alignment() -> None:
    (view,) = made(1, 4096)
    assert isinstance(view, Tensor) and view.data_ptr() % 4096 == 0
    assert view[64:128].view(torch.complex128).numel() == 4
