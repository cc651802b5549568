"""A checkpoint that cannot be used is refused with what, why and fix, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runs
import tutti
from ranks import Ranks
from tutti.errors import CheckpointError

Damage = Callable[[Path], Any]


def _biggest(path: Path) -> Path:
    return max(path.rglob("*.distcp"), key=lambda f: f.stat().st_size)


def truncate(path: Path) -> None:
    file = _biggest(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(path: Path) -> None:
    file = _biggest(path)
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    file.write_bytes(data)


def remove_shards(path: Path) -> None:
    _biggest(path).unlink()


def flip_a_loss(path: Path) -> None:
    file = path / "tutti.json"
    text = file.read_text()
    at = text.index('"losses": [') + len('"losses": [')
    file.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def other_types(path: Path) -> None:
    (path / "tutti.json").write_text('{"format": 2, "files": 3, "tensors": [], "extra": 1}')


def other_values(path: Path) -> None:
    (path / "tutti.json").write_text('{"format": null}')


def remove_manifest(path: Path) -> None:
    (path / "tutti.json").unlink()


def newer(path: Path) -> None:
    file = path / "tutti.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


def cut_manifest(path: Path) -> None:
    file = path / "tutti.json"
    file.write_text(file.read_text()[:40])


def no_manifest(path: Path) -> None:
    (path / "tutti.json").write_text("[]")


def remove_all(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


DAMAGES: dict[Damage, str] = {
    truncate: "is damaged",
    overwrite: "has another checksum",
    remove_shards: "has no bytes of",
    remove_manifest: "is not a whole checkpoint",
    newer: "has format 99",
    cut_manifest: "cannot be read",
    no_manifest: "cannot be read",
    flip_a_loss: "its checksum is another",
    other_types: "checksum is another",
    other_values: "cannot be read",
    remove_all: "no such directory",
}


def assert_refused(step: tutti.Step, path: Path, said: str) -> None:
    before = {n: runs.whole(x).clone() for n, x in step.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        step.load(path)
    error = caught.value
    assert said in str(error)
    assert error.what and error.why and error.fix
    for name, x in step.state_dict().items():
        assert torch.equal(runs.whole(x), before[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint after two steps."""
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    runs.train_and_save("sgd", "", 2, str(path))
    return path


@pytest.fixture(scope="module")
def play() -> runs.Play:
    """Another run of the same program; each test that loads into it starts from `saved`."""
    return runs.prepare("sgd")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_directory_is_refused(
    damage: Damage, tmp_path: Path, saved: Path, play: runs.Play
) -> None:
    path = tmp_path / "saved"
    shutil.copytree(saved, path)
    expected = runs.on_one_device("sgd", 4)[0]
    assert play.step.load(path)["losses"] == expected[:2]  # whole, it loads
    play.losses(1)
    damage(path)
    assert_refused(play.step, path, DAMAGES[damage])
    assert play.step.num_steps == 3
    assert play.losses(1)[0] == pytest.approx(expected[3], rel=1e-6)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    tmp_path: Path, play: runs.Play
) -> None:
    path = tmp_path / "saved"
    runs.train_and_save("gpt", "", 1, str(path))
    play.losses(1)
    assert_refused(play.step, path, "another model or optimizer")
    runs.train_and_save("rmsprop", "", 1, str(path := tmp_path / "rmsprop"))
    assert_refused(play.step, path, "such as optim.down.bias.grad_avg")


def test_other_shapes_are_named(play: runs.Play) -> None:
    play.losses(1)
    state = play.step.state_dict() | {"up.weight": torch.zeros(3, 5)}
    with pytest.raises(CheckpointError, match=r"up\.weight is \[3, 5\] there and \[64, 16\] here"):
        play.step.load_state_dict(state)


@pytest.mark.parametrize("damage", ["cut", "missing", "another", "text"])
def test_a_wrong_safetensors_file_is_refused(damage: str, tmp_path: Path, play: runs.Play) -> None:
    path = tmp_path / "model.safetensors"
    runs.prepare("gpt" if damage == "another" else "sgd").step.save(path)
    play.losses(1)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("not a file of tensors")
    assert_refused(play.step, path, "another model" if damage == "another" else "cannot read")


def refused_on_a_rank(path: str) -> tuple[str, list[float], bool]:
    """What `load` says on this rank, the losses after it, and whether the state stayed."""
    play = runs.prepare("sgd", "data=2 zero=3")
    play.losses(1)
    before, said = play.whole_state(), ""
    try:
        play.step.load(path)
    except CheckpointError as error:
        said = str(error)
    same = all(np.array_equal(x, before[n]) for n, x in play.whole_state().items())
    return said, play.losses(2), same


def test_all_ranks_refuse_a_truncated_checkpoint_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    ranks.run(runs.train_and_save, "sgd", "data=2 zero=3", 2, str(path), n=2)
    truncate(path)
    expected = runs.on_one_device("sgd", 3)[0]
    for said, losses, same in ranks.run(refused_on_a_rank, str(path), n=2):
        assert "is damaged" in said and "fix" in said
        assert same
        runs.assert_same_losses(losses, expected[1:])
