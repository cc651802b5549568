"""Each rank of a host with several GPUs has its own, in scripts that say `cuda`: on a mock of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tutti.launch import ranks, worker


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that a process with four GPUs has chosen."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[-1] if found else 0)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


@pytest.mark.parametrize(("local_rank", "wanted"), [("2", [2]), ("0", [0]), ("4", [])])
def test_a_rank_takes_the_gpu_of_its_number(
    local_rank: str, wanted: list[int], chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth rank of four GPUs, or a rank that sees one GPU alone, keeps the one it has."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    ranks.choose_gpu()
    assert chosen == wanted


def test_a_choice_of_the_script_stays(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    chosen.append(3)
    ranks.choose_gpu()
    assert chosen == [3]


@pytest.mark.parametrize("has_two", [False, True])
def test_a_rank_waits_for_cuda_to_start(
    has_two: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    if has_two:
        second.touch()
    waiting: list[object] = []
    monkeypatch.setattr(worker, "SECOND_GPU", str(second))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_queued_calls", waiting)
    worker._choose_gpu()
    assert len(waiting) == has_two
