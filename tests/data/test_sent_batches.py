"""Batches that a worker cannot send: an error with the samples, where PyTorch would lose the batch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from small_datasets import Numbers
from tutti.data import sent_batches

FULL = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"


def full(*_: Any) -> None:
    raise RuntimeError(FULL)


def stacked(samples: list[Tensor]) -> Tensor:
    return torch.cat(samples)


class Held:
    """An object with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def locked(samples: list[Tensor]) -> Any:
    return {"x": torch.cat(samples), "lock": threading.Lock()}


def held(samples: list[Tensor]) -> Held:
    return Held(torch.cat(samples))


@pytest.mark.parametrize("collate", [stacked, held])
def test_shared_memory_without_room_is_an_error_with_the_samples(
    collate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = "fork"  # the workers have the replaced function
    loader = tutti.loader(
        Numbers(4),
        2,
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context=context,
        timeout=60,
    )
    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(
        tutti.TuttiError, match="no shared memory for the batch of sample 0"
    ) as caught:
        next(iter(loader))
    assert "No space left" in caught.value.why and "/dev/shm" in caught.value.fix


def test_no_room_while_it_stacks_is_no_fault_of_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tutti.data.collation.default_collate", full)
    loader = tutti.loader(Numbers(4), 2, num_workers=1, multiprocessing_context="fork", timeout=60)
    with pytest.raises(tutti.TuttiError, match="no shared memory for the batch of sample 0"):
        next(iter(loader))


def test_what_does_not_pickle_is_an_error_with_the_samples() -> None:
    loader = tutti.loader(Numbers(4), 2, collate_fn=locked, num_workers=1, timeout=60)
    with pytest.raises(
        tutti.TuttiError, match=r"cannot send the batch of sample 0.*pickle"
    ) as caught:
        next(iter(loader))
    assert "num_workers=0" in caught.value.fix


def test_a_limit_has_its_own_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_batches, "get_worker_info", object)
    said = "unable to resize file </torch_1_2_0> to the right size: File too large (27)"
    found = sent_batches.no_room(RuntimeError(said), "sample 0")
    assert found is not None and "ulimit -f" in found.fix
    assert sent_batches.no_room(RuntimeError("stack expects each tensor"), "sample 0") is None
