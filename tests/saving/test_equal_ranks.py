"""A save of ranks that hold other values of a weight is refused: it would keep those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tutti
from captured_once import captured_once
from ranks import Ranks
from small_steps import step as train_step
from tutti.errors import CheckpointError, CommError
from tutti.saving.equal_ranks import _hash, _near, _sums, hash_on_device

PLACE = {"0.weight": "tensor, -", "2.weight": "-, tensor"}


class UnequalRun:
    """A run of which the last rank may change its own values."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = tutti.distribute(train_step, self.model, self.optimizer, layout, place=PLACE)
        self.is_last = dist.get_rank() == dist.get_world_size() - 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            seed = torch.Generator().manual_seed(self.step.num_steps)
            with captured_once("unequal"):
                self.step(torch.randn(8, 16, generator=seed).double())

    def change(self, x: Any, change: Callable[[Tensor], Any]) -> None:
        with torch.no_grad():
            change(getattr(x, "_local_tensor", x)) if self.is_last else None


def refused(path: str, layout: str, asynchronous: bool) -> list[str]:
    """The errors of saves after changes on one rank; in between a save is whole."""
    run, said = UnequalRun(layout), []
    with tutti.Checkpoints(path, step=run.step, every=100, asynchronous=asynchronous) as saves:
        run.steps(1)
        saves.tick()
        saves.save()
        changes: list[tuple[Any, Callable[[Tensor], Any]]] = [
            (run.model[2].bias, lambda x: x[5:6].add_(0.5)),
            (run.optimizer.state[run.model[2].bias]["exp_avg_sq"], lambda x: x.mul_(1.5)),
        ]
        for x, change in changes[: 1 if "zero" in layout else 2]:  # its slots are apart
            kept = x.detach().clone()
            run.change(x, change)
            run.step.num_steps += 1  # no step looks at the values before
            for save in (saves.save, lambda: run.step.save(path + ".alone")):
                with pytest.raises(CheckpointError) as caught:
                    save()
                said.append(str(caught.value))
            with torch.no_grad():
                x.copy_(kept)
        assert saves.steps() == [1] and not Path(path + ".alone").exists()
        saves.save()
        assert saves.steps() == [1, run.step.num_steps]
    return said


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "tensor=2"])
def test_a_save_of_other_values_is_refused_by_name(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    first, second = ranks.run(refused, str(tmp_path / "run"), layout, False, n=2)
    assert first == second
    names = ["2.bias"] * 2 + ["optim.2.bias.exp_avg_sq"] * (0 if "zero" in layout else 2)
    for text, name in zip(first, names, strict=True):
        assert f'"{name}" has other values on rank 0 than on rank 1' in text
        assert "load the checkpoint of step 1, with the same values on all ranks" in text


def saved_soon(path: str) -> tuple[str, list[int]]:
    """The error of a background save after a change on one rank, and the steps that are saved."""
    run = UnequalRun("data=2")
    with tutti.Checkpoints(path, step=run.step, every=2, asynchronous=True) as saves:
        for k in range(4):
            run.steps(1)
            if k == 3:
                run.change(run.model[0].weight, lambda x: x.add_(1.0))
                with pytest.raises(CheckpointError) as caught:
                    saves.tick()
            else:
                saves.tick()
    return str(caught.value), saves.steps()


def test_a_background_save_of_other_values_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text, steps in ranks.run(saved_soon, str(tmp_path / "run"), n=2):
        assert '"0.weight" has other values on rank 0 than on rank 1' in text
        assert steps == [2]


def saved_with_rounding(path: str, layout: str) -> list[int]:
    run = UnequalRun(layout)
    with tutti.Checkpoints(path, step=run.step) as saves:
        run.steps(1)
        run.change(run.model[0].bias, lambda x: x.mul_(1 + 1e-12))
        saves.save()
        run.change(run.model[0].weight, lambda x: x.mul_(1 + 1e-12))
        run.steps(2)
        saves.save()
    return saves.steps()


def test_values_that_differ_by_rounding_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(saved_with_rounding, str(tmp_path / "run"), "data=2", n=2) == [[1, 3]] * 2


def named_by_a_step(path: str) -> str:
    """The error of a step that finds a change after a save."""
    run = UnequalRun("data=2")
    run.steps(2)
    run.step.save(path)
    run.steps(1)
    run.change(run.model[2].bias, lambda x: x.add_(0.01))
    with pytest.raises(CommError) as caught:
        run.steps(3)
    return str(caught.value)


def test_a_step_that_finds_other_values_names_the_last_good_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    for text in ranks.run(named_by_a_step, str(tmp_path / "saved"), n=2):
        assert '"2.bias" has other values' in text
        assert "load the checkpoint of step 2, with the same values on all ranks" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_sums_tell_rounding_from_a_change(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(300, 1001, generator=generator) * 1000).to(dtype)
    y = x.clone()
    assert _hash(x) == _hash(y) and hash_on_device(x) == hash_on_device(y)
    assert _near(_sums(x), _sums(y))
    y[7] += 300
    assert _hash(x) != _hash(y) and hash_on_device(x) != hash_on_device(y)
    assert not _near(_sums(x), _sums(y))
    if dtype == torch.float32:
        noise = torch.randn(x.shape, generator=generator) * 1e-6
        assert _near(_sums(x), _sums(x * (1 + noise)))
