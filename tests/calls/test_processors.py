"""Ranks whose processors have other features are refused at the first call, with the variables to set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import forked
from tutti.calls.processors import gpu_name, refuse_shared_gpus
from tutti.errors import CommError

SCRIPT = """
import os
for name, value in ({unlike}).items():
    if os.environ["RANK"] == "1":
        os.environ[name] = value
import torch, torch.nn as nn, tutti
def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss
torch.manual_seed(0)
model = nn.Linear(4, 4)
step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.1))
step(torch.ones(4, 4))
print("played")
"""


def run(tmp_path: Path, unlike: dict[str, str], layout: str) -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(unlike=unlike))
    words = ["-m", "tutti", "run", "-n", "2", "--layout", layout, str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "30"}
    end = forked.run(words, env=env, cwd=tmp_path, timeout=120)
    return end.returncode, end.stdout + end.stderr


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_other_kernels_on_one_rank_are_refused_by_name(tmp_path: Path, layout: str) -> None:
    code, said = run(tmp_path, {"ONEDNN_MAX_CPU_ISA": "SSE41"}, layout)
    assert code and "played" not in said
    assert "the ranks choose kernels by other features of their processors" in said
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in said and "rank 1" in said and "fix" in said


def test_equal_ranks_and_replicas_play(tmp_path: Path) -> None:
    assert run(tmp_path, {}, "data=2")[0] == 0
    unlike = {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    code, said = run(tmp_path, unlike, "replica=2 sync=average(every=2)")
    assert code == 0 and "played" in said


def test_two_ranks_of_one_gpu_are_refused() -> None:
    names = ["GPU-a one", "GPU-b one", "GPU-a two"]
    refuse_shared_gpus(names)
    refuse_shared_gpus(["", ""])  # processors
    with pytest.raises(CommError, match="ranks 1 and 3 lie on one GPU"):
        refuse_shared_gpus([*names, "GPU-b one"])


def test_only_a_gpu_has_a_name() -> None:
    assert gpu_name(torch.device("cpu")) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its name not read")
def test_the_name_of_a_gpu_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    name = gpu_name(torch.device("cuda"))
    assert name and name == gpu_name(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert gpu_name(torch.device("cuda")) != name
