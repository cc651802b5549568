"""Real ranks with `precision=bf16`: near float32, near one device, and checkpoints that do not care."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import runs
import tutti
from captured_once import captured_once
from ranks import Ranks

# A GPT of one layer, with dropout.
NAME = "gpt_tied"
NUM_STEPS = 6
GPT_STEPS, GPT_TOLERANCE = 30, 0.02


def assert_near(found: list[float], expected: list[float], rtol: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=0)


def train(name: str, layout: str) -> tuple[list[float], set[str]]:
    """The losses of a run, and the dtypes of its state after it."""
    play = runs.prepare(name, layout, wide=False)
    with captured_once((name, False)):
        losses = play.losses(NUM_STEPS)
    return losses, {str(x.dtype) for x in play.step.state_dict().values()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (NAME, "data=2 zero=3"),
        (NAME, "tensor=2"),
        ("resnet", "data=2"),
    ],
)
def test_ranks_take_the_steps_of_one_device(ranks: Ranks, name: str, layout: str) -> None:
    plain, _ = ranks.after(train, name, "").result
    half = ranks.after(train, name, "precision=bf16")
    one, dtypes = half.result
    assert dtypes <= {"torch.float32", "torch.int64"}
    assert one != plain
    for losses, kept in half.run(train, name, f"{layout} precision=bf16", n=2):
        assert_near(losses, one, rtol=5e-3)
        assert kept <= dtypes


def test_checkpoints_do_not_depend_on_it(ranks: Ranks, tmp_path: Path) -> None:
    """Saved in bf16 on two ranks, resumed in float32 on one device; and the other way round."""
    path = str(tmp_path / "half")
    half = ranks.after(train, NAME, "precision=bf16")
    half.run(runs.train_and_save, NAME, "data=2 zero=3 precision=bf16", 5, path, False, n=2)
    whole = runs.on_one_device(NAME, 10, False)[0]
    losses, extra, state = runs.resume(NAME, "", 5, path, False)
    assert_near(extra["losses"], whole[:5], rtol=0.02)
    assert_near(losses, whole[5:], rtol=0.02)
    assert {x.dtype for x in state.values() if x.dtype.kind == "f"} == {np.dtype("float32")}
    path = str(tmp_path / "full")
    runs.train_and_save(NAME, "", 5, path, False)
    for found in half.run(runs.resume, NAME, "data=2 zero=3 precision=bf16", 5, path, False, n=2):
        assert_near(found[0], whole[5:], rtol=0.02)
        assert found[1]["losses"] == whole[:5]


def two_precisions(layout: str) -> tuple[float, float, bool]:
    """A model trained in bf16: its loss in float32 and in bf16, and whether it is in shards."""
    play = runs.prepare(NAME, f"{layout} precision=bf16", wide=False)
    with captured_once((NAME, False)):
        play.losses(1)
    batch = play.batches[1]

    def loss_of(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, targets.flatten())

    evaluate = [
        tutti.distribute(loss_of, play.step.model, layout=f"{layout}{word}")
        for word in ("", " precision=bf16")
    ]
    full, half = (e(*batch).item() for e in evaluate)
    assert_near(play.losses(1), [full], rtol=0.01)
    return full, half, all(isinstance(p, DTensor) for p in play.step.model.parameters())


def test_steps_on_one_model_may_differ_in_it(ranks: Ranks) -> None:
    one = ranks.after(train, NAME, "precision=bf16")
    for full, half, sharded in one.run(two_precisions, "data=2 zero=3", n=2):
        assert sharded and full != half
        assert_near([half], [full], rtol=0.01)


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_as_in_float32() -> None:
    """Thirty steps of `examples/gpt.py`, dropout included: every loss within 2 %."""
    gpt = example()
    text = torch.tensor(list("\n\n".join(gpt.topics[n] for n in sorted(gpt.topics)).encode()))

    def losses(layout: str) -> list[float]:
        torch.manual_seed(0)
        model = gpt.GPT(64, 1, 4, 0.1)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
        step = tutti.distribute(gpt.train_step, model, optimizer, layout)
        batches = tutti.loader(gpt.windows(text, 4 * GPT_STEPS), 4, shuffle=True)
        return [step(*batch).item() for batch in batches]

    full, half = losses(""), losses("precision=bf16")
    assert full[-1] < 0.8 * full[0]
    worst = max(abs(a - b) / b for a, b in zip(half, full, strict=True))
    print(f"largest relative difference of the losses {worst:.2e}")
    assert worst < GPT_TOLERANCE
