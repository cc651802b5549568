"""Every run says once what its step takes beside what was predicted; nothing else changes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import forked
import tutti
from tests.recording.test_step_watch import train
from tutti.environment import REPORT, RUN_DIR
from tutti.execution.measure import peak_nbytes

SCRIPT = """
import os, torch, tutti
from torch import nn

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

torch.manual_seed(0)
model = nn.Linear(16, 16)
step = tutti.distribute(train, model, torch.optim.Adam(model.parameters()))
found = [step(torch.ones(8, 16)).item() for _ in range(8)]
if os.environ["RANK"] == "0":
    print(found)
"""


def run(folder: Path, **environment: str) -> tuple[str, str]:
    """What a run of two ranks prints."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = ["-m", "tutti", "run", "-n", "2", "--layout", "data=2 zero=1", script]
    done = forked.run(command, env={**os.environ, **environment}, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_run_says_it_once_and_computes_the_same(tmp_path: Path) -> None:
    out, err = run(tmp_path)
    (line,) = [x for x in err.splitlines() if " measured" in x]
    assert line.startswith("step ") and "; peak memory " in line
    held = re.search(r"\(([\d.]+) kB of it held between calls\)", line)
    # 272 parameters, half of each of Adam's moments, and the batch, of 4 bytes each.
    assert held is not None and float(held[1]) == pytest.approx(
        4 * (2 * 272 + 128) / 1000, rel=0.05
    )
    assert run(tmp_path, TUTTI_PREDICTION="0") == (out, "")


def test_other_launchers_say_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "RANK": "0"}
    ran = forked.run([script], env=environment, cwd=tmp_path, timeout=60)
    assert ran.returncode == 0 and ran.stdout and ran.stderr == ""


@pytest.mark.parametrize("variable", [RUN_DIR.name, REPORT.name])
@pytest.mark.parametrize("waits", [False, True])
def test_the_profiler_of_the_user_keeps_its_events(
    variable: str,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second call comes while it is on, or while it warms up: no memory is measured then."""
    monkeypatch.setenv(variable, str(tmp_path))
    plan: Any = {"schedule": schedule(wait=1, warmup=1, active=2)} if waits else {}
    model = nn.Linear(16, 16)
    step = tutti.distribute(train, model, torch.optim.Adam(model.parameters()), "")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, **plan) as seen:
        for _ in range(8):
            step(torch.ones(8, 16))
            seen.step()
    counts = {event.key: event.count for event in seen.key_averages()}
    # All calls, of which the first one updates in another form; or two of each four.
    assert counts.get("aten::_fused_adam_", 0) >= (4 if waits else 7)
    assert "memory" not in capsys.readouterr().err


def test_a_measurement_inside_of_a_profiler_is_refused() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(tutti.TuttiError, match="inside of PyTorch's profiler"),
    ):
        peak_nbytes(lambda: torch.ones(2))
