"""The GPU's benchmark where there is none: it says so, and its captured step is the plain one in bf16."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.models import optimizer

TINY = gpu.TiedCase(name="tiny", per_rank=4, vocab=512, window=64, width=128, depth=2, head_dim=32)


def test_the_model_has_350_million_parameters() -> None:
    with torch.device("meta"):
        model = gpu.MODEL.make()
    assert 350e6 < sum(p.numel() for p in model.parameters()) < 360e6


def test_it_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_the_captured_step_and_its_peak() -> None:
    step, model = gpu.captured(TINY, "cpu"), TINY.model()
    opt, plain = optimizer(model), gpu.plain_step(TINY)
    for batch in gpu.given(TINY, "cpu"):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = plain(model, opt, *batch)
        torch.testing.assert_close(step(*batch), wanted.detach().float(), rtol=1e-2, atol=0)
    predicted, measured = gpu.peaks(step, gpu.given(TINY, "cpu")[0])
    assert abs(measured - predicted) < 0.05 * predicted
