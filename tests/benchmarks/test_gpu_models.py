"""The comparison of public models on a GPU, where there is none: it says so; predictions need none."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_models
from tutti.planning.hardware_files import cluster_of

TINY = replace(
    gpu_models.MODELS["gpt2"],
    options={**gpu_models.MODELS["gpt2"].options, "n_layer": 1, "n_embd": 32, "n_head": 2,
             "vocab_size": 64, "n_positions": 16},
    batch=(2, 16),
)  # fmt: skip


def test_it_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_models"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_models.main() == 1
    assert "no GPU of H100" in capsys.readouterr().err


def test_every_gpu_has_a_file() -> None:
    for name in gpu_models.GPUS.values():
        assert cluster_of(f"1 x {name}").count == 1


def test_captured_and_predicted() -> None:
    step, call = gpu_models.captured(TINY, "cpu", "0")
    plain = gpu_models.eager(TINY, "cpu")
    assert float(call()) == pytest.approx(float(plain()), rel=1e-3)
    guess = gpu_models.predicted(step, cluster_of("1 x h200"))
    assert guess["seconds"] == pytest.approx(sum(ms for _, ms in guess["ops"].values()) / 1e3)
    found = {
        "predicted": guess,
        "seconds": {"by ops": 2 * guess["seconds"]},
        "nbytes": guess["nbytes"],
        "losses": {"by ops": 1.0},
    }
    assert "-50.0%" in gpu_models.line("gpt2", found) and "+0.0%" in gpu_models.line("gpt2", found)
