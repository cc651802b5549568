"""Schedulers that Accelerate has prepared move once for each process: refused before the first step."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from tutti.calls.accelerate_schedulers import refuse_schedulers_of_processes
from tutti.errors import CaptureError


class Prepared:
    """The attributes of Accelerate's scheduler that decide how often it moves."""

    def __init__(self, optimizer: Any, *, by_process: bool = True, split: bool = False) -> None:
        self.optimizers = [types.SimpleNamespace(optimizer=optimizer)]
        self.step_with_optimizer, self.split_batches = by_process, split


def _pretend(patched: pytest.MonkeyPatch, num_processes: int) -> None:
    whole, schedulers = types.ModuleType("accelerate"), types.ModuleType("accelerate.scheduler")
    whole.PartialState = lambda: types.SimpleNamespace(num_processes=num_processes)  # type: ignore[attr-defined]
    schedulers.AcceleratedScheduler = Prepared  # type: ignore[attr-defined]
    patched.setitem(sys.modules, "accelerate", whole)
    patched.setitem(sys.modules, "accelerate.scheduler", schedulers)


def test_only_a_scheduler_of_this_optimizer_that_counts_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (torch.optim.SGD([torch.zeros(1)], 0.1) for _ in range(2))
    _pretend(monkeypatch, 2)
    kept = [Prepared(other), Prepared(one, by_process=False), Prepared(one, split=True)]
    refuse_schedulers_of_processes([one])
    kept.append(Prepared(one))
    with pytest.raises(CaptureError, match="once for each process"):
        refuse_schedulers_of_processes([one])
    _pretend(monkeypatch, 1)
    refuse_schedulers_of_processes([one])
