"""Contracts of `torch_private/gpus.py`."""

from __future__ import annotations

import pytest
import torch

from tutti.torch_private.gpus import when_cuda_starts


def test_a_call_waits_until_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    waiting: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_queued_calls", waiting)
    when_cuda_starts(lambda: called.append(1))
    assert len(waiting) == 1 and not called
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    when_cuda_starts(lambda: called.append(2))
    assert called == [2]
