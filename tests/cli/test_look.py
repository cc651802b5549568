"""`tutti verify` and `tutti explain`: a script's step is looked at, not run; errors are a message."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.graph.players.virtual_ranks import VirtualRanks

SCRIPT = """
import sys
import torch
from torch import nn
import tutti

def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

@torch.no_grad()
def eval_step(model, x):
    return model(x).sum()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = tutti.distribute(train_step, model, optimizer)
evaluate = tutti.distribute(eval_step, model)
with open(__file__ + ".txt", "w") as notes:
    print("arguments", *sys.argv[1:], file=notes)
    print("loss before", evaluate(torch.ones(8, 8)).item(), file=notes)
for k in range(2):
    step(torch.randn(8, 8))
    raise SystemExit("took a step")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--devices", "2 x h100"],
        ["simulate", "--devices", "2 x h100", "--layout", "data=2"],
        ["explain"],
    ],
    ids=lambda words: words[0],
)
def test_a_batch_of_no_samples_is_refused_as_in_a_run(words: list[str], script: Path) -> None:
    script.write_text(SCRIPT.replace("step(torch.randn(8, 8))", "step(torch.randn(0, 8))"))
    made = invoke(*words, script)
    assert made.exit_code == 2 and "the batch is empty: batch tensor 0" in made.stderr


def test_verify_and_explain_take_the_precision(script: Path) -> None:
    """The evaluation before the first training step runs as the script has it."""
    layout = "data=2 zero=3 precision=bf16"
    verdict = invoke("verify", "--layout", layout, script)
    assert verdict.exit_code == 0 and f'verify "{layout}": ok' in verdict.output
    text = invoke("explain", "--layout", layout, script).output
    assert re.search(r"all_gather +bf16 +data +weight for the forward", text)
    assert re.search(r"reduce_scatter +f32 +data +gradient into the update", text)
    assert not re.search(r"(all_reduce|reduce_scatter) +bf16", text)


def test_verify_prints_a_verdict_and_ends_with_0(script: Path) -> None:
    result = invoke("verify", "--layout", "data=2 zero=3", script, "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert "data=2 zero=3" in result.output
    assert "took a step" not in result.output
    notes = Path(f"{script}.txt").read_text()
    assert "arguments --epochs 3" in notes
    assert re.search(r"loss before -?\d", notes)  # a step without an optimizer may come first


def test_verify_of_a_wrong_step_ends_with_1(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is wrong on purpose: a sum over ranks that does nothing."""

    def reduce_nothing(self: VirtualRanks, args: list[Any]) -> list[Any]:
        return self._grouped(args, list)

    monkeypatch.setattr(VirtualRanks, "_all_reduce", reduce_nothing)
    result = invoke("verify", "--layout", "data=2", script)
    assert result.exit_code == 1, result.output
    assert "train.py:" in result.output  # the first value that differs


def test_the_environment_is_left_as_it_was(script: Path) -> None:
    before = dict(os.environ)
    invoke("verify", "--layout", "data=2", script)
    assert dict(os.environ) == before


def test_what_a_script_does_after_its_step_changes_nothing(tmp_path: Path) -> None:
    """In a process that goes on its `except` and `finally` run, but no step is taken."""
    path = tmp_path / "train.py"
    before, _, _ = SCRIPT.partition("for k in range(2):")
    path.write_text(
        f"""{before}
weights = [p.clone() for p in model.parameters()]
try:
    for k in range(2):
        try:
            step(torch.randn(8, 8))
        except:
            pass
finally:
    assert all(map(torch.equal, weights, model.parameters()))
    open("alive", "w").write("no step")
    raise ValueError("instead")
"""
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        result = invoke("verify", "--layout", "data=2", path)
        assert (tmp_path / "alive").read_text() == "no step" and Path.cwd() == tmp_path
    finally:
        os.chdir(before)
    assert result.exit_code == 0 and 'verify "data=2": ok' in result.stdout
    assert "instead" not in result.output


def test_explain_shows_every_tensor_and_collective(script: Path) -> None:
    result = invoke("explain", "--layout", "data=2 zero=1", script)
    assert result.exit_code == 0, result.output
    for name in ("0.weight", "2.bias", "optim.0.weight.exp_avg"):
        assert name in result.output
    assert "reduce_scatter" in result.output or "all_reduce" in result.output
    assert "train.py:" in result.output
    assert "took a step" not in result.output


def test_explain_follows_one_tensor(script: Path) -> None:
    result = invoke("explain", "--layout", "data=2 zero=3", "--tensor", "2.*", script)
    assert result.exit_code == 0, result.output
    assert "2.weight: whole  (stored " in result.output and "2.bias" in result.output
    assert "0.weight" not in result.output


def test_explain_prints_the_graph(script: Path) -> None:
    result = invoke("explain", "--layout", "data=2", "--graph", script)
    assert result.exit_code == 0, result.output
    assert "@data" in result.output and "all_reduce(" in result.output
    assert "# train.py:" in result.output or "train.py:" in result.output


@pytest.mark.parametrize("command", ["verify", "explain"])
def test_a_script_without_a_training_step_is_refused(command: str, tmp_path: Path) -> None:
    path = tmp_path / "nothing.py"
    path.write_text("print('nothing to see')\n")
    result = invoke(command, "--layout", "data=2", path)
    assert result.exit_code == 2
    assert (
        "CaptureError" in result.stderr and "ended without calling a training step" in result.stderr
    )
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["verify", "explain"])
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dta=2", "did you mean data"),
        ("data=2 server=4", "keeps the weights of workers"),
    ],
)
def test_mistakes_are_a_message_and_exit_code_2(
    command: str, layout: str, said: str, script: Path
) -> None:
    result = invoke(command, "--layout", layout, script)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "  fix  " in result.stderr
    assert "Traceback" not in result.output
