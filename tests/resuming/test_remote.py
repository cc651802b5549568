"""Folders behind URLs: what a local folder keeps, without locks and renames."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from upath import UPath

import forked
import tutti
from captured_once import captured_once
from ranks import Ranks
from resuming.small_run import SmallRun, losses_of, with_writers
from tutti.checkpoint.manifest import MANIFEST
from tutti.errors import CheckpointError, TuttiError
from tutti.resuming.run_folder import look_at, numbers

STEPS, SAVED = 12, 8


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    """All runs of this process share it."""
    with captured_once("small run"):
        yield


@pytest.fixture
def url() -> str:
    """A folder in the memory of this process."""
    return f"memory://{secrets.token_hex(8)}/run"


def names(url: str) -> list[str]:
    return sorted(one.name for one in UPath(url).iterdir())


def test_a_restored_run_has_the_losses_of_an_undisturbed_one(url: str, tmp_path: Path) -> None:
    options = {"every": 2, "keep": 2}
    expected = losses_of(str(tmp_path / "a"), "", STEPS, options)
    assert losses_of(url, "", SAVED, options) == expected[:SAVED]
    assert names(url) == ["step-00000006", "step-00000008"]
    torch.manual_seed(1)  # batches go on from the saved generator
    assert losses_of(url, "", STEPS, options) == expected[SAVED:]
    assert names(url) == ["step-00000010", "step-00000012"]


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}])
def test_ranks_write_and_read_a_remote_folder(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The local file system of fsspec, in another layout after the save."""
    every, layout = {"every": SAVED, **options}, "data=2 zero=3"
    expected = ranks.run(with_writers, str(tmp_path / "a"), layout, STEPS, every, [], n=2)[0]
    url = f"file://{tmp_path}/b"
    # On rank 1 in a fresh process, which has to find its way to the folder by itself.
    found = ranks.run(with_writers, url, layout, SAVED, every, [1], n=2)
    assert found == [expected[:SAVED]] * 2
    assert numbers(UPath(url)) == [SAVED] and names(url) == [f"step-{SAVED:08d}"]  # type: ignore[arg-type]
    found = ranks.run(with_writers, url, layout, STEPS, every, [], n=2)
    assert found == [expected[SAVED:]] * 2
    assert look_at(tmp_path / "b", SAVED, check=True).damage == ""


def test_a_killed_save_is_no_checkpoint_and_is_removed(url: str) -> None:
    run = SmallRun(url, every=2)
    with run.checkpoints:
        run.until(4)
    (UPath(url) / "step-00000004" / MANIFEST).unlink()  # as if it had died before the last file
    again = SmallRun(url, every=2)
    with again.checkpoints, pytest.warns(UserWarning, match="step-00000004 is left out"):
        assert again.checkpoints.restore() == 2
    assert again.checkpoints.steps() == [2]
    with again.checkpoints:
        again.until(3)
        again.checkpoints.save()
    assert names(url) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("cut", [True, False])
def test_damage_is_named(url: str, cut: bool) -> None:
    run = SmallRun(url, every=2)
    with run.checkpoints:
        run.until(4)
    (file,) = (UPath(url) / "step-00000004").glob("state-*/*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[:100] if cut else bytes([content[0] ^ 1]) + content[1:])
    again = SmallRun(url, every=2)
    said = "truncated" if cut else "checksum"
    with pytest.warns(UserWarning, match=f"step-00000004 is left out.*{said}"):
        assert again.checkpoints.restore() == 2


def test_a_step_is_saved_and_loaded(url: str) -> None:
    def made(seed: int) -> tuple[nn.Module, tutti.Step]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        return model, tutti.distribute(train_step, model, torch.optim.Adam(model.parameters()))

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 3)
    _, step = made(0)
    step(x)
    for k in range(2):  # the second takes the place of the first
        step.save(url, {"k": k})
    expected = step(x)
    _, other = made(1)
    assert other.load(url) == {"k": 1}
    assert torch.equal(other(x), expected)
    assert len([*UPath(url).glob("state-*")]) == 1
    for path in (f"{url}/model.safetensors", f"{url}/model.safetensors.index.json"):
        with pytest.raises(CheckpointError, match="remote file of weights"):
            step.save(path)
        with pytest.raises(CheckpointError, match="remote file of weights"):
            step.load(path)


def test_memory_of_one_process_is_refused_on_ranks(ranks: Ranks, url: str) -> None:
    for said in ranks.run(refused, url, n=2):
        assert "is a folder of one process" in said


def refused(url: str) -> str:
    run = SmallRun(url, "data=2", every=1)
    with run.checkpoints, pytest.raises(CheckpointError) as error:
        run.one()
    return str(error.value)


def test_an_unknown_protocol_is_refused_before_anything_starts() -> None:
    with pytest.raises(TuttiError, match="nosuch://bucket/run is no folder that can be reached"):
        SmallRun("nosuch://bucket/run", every=1)


def test_the_command_lists_a_remote_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    run = SmallRun(url, every=2, keep=None)
    with run.checkpoints:
        run.until(6)
    command = ["-m", "tutti", "checkpoints", url, "--check", "--json", "--prune", "2"]
    given: Any = {"env": dict(os.environ), "cwd": Path.cwd(), "timeout": 60}
    done = forked.run(command, **given)
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in json.loads(done.stdout)] == [4, 6]
    assert names(url) == ["step-00000004", "step-00000006"]
    command[3] = f"file://{tmp_path}/none"
    done = forked.run(command, **given)
    assert done.returncode == 2 and "directory" in done.stderr
