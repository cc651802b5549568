"""What `step.save` promises: all ranks or none, the last checkpoint until the next, one cause for all."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file
from torch import nn

import runs
import tutti
from forked import run
from ranks import Ranks
from tutti.errors import CheckpointError


def forked(act: Callable[[], Any]) -> int:
    """The process id of a copy of this one that does `act` and ends."""
    pid = os.fork()
    if not pid:
        try:
            act()
        finally:
            os._exit(0)
    return pid


# `TUTTI_TEST_KILLS=200` for a longer look; tests/checkpoint tries every moment of one save.
NUM_KILLS = int(os.environ.get("TUTTI_TEST_KILLS", "20"))


def test_a_step_that_saves_survives_kills(tmp_path: Path) -> None:
    """The README's own line, in processes that do nothing else; killed at random moments."""
    play, path, chooses = runs.prepare("sgd"), tmp_path / "checkpoint", random.Random(0)
    play.losses(1)
    os.waitpid(forked(lambda: play.step.save(path)), 0)  # this process does not own the folder
    newest = play.step.num_steps

    def train() -> None:
        while True:
            play.losses(1)
            play.step.save(path, {"number": play.step.num_steps})

    began = time.monotonic()
    os.waitpid(forked(lambda: play.step.save(path)), 0)
    seconds = time.monotonic() - began
    for _ in range(NUM_KILLS):
        pid = forked(train)
        time.sleep(chooses.uniform(0.0, 3 * seconds))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = play.step.load(path).get("number", 1)
        assert newest <= found == play.step.num_steps  # counts and files are of one save
        newest = found
    assert newest > 1
    runs.assert_same_losses(play.losses(1), runs.on_one_device("sgd", newest + 1)[0][newest:])


def saved_before_a_step(path: str) -> Any:
    """Save at once, with weights that differ by rank; the first weights of this rank."""
    play = runs.prepare("sgd", "data=2 zero=3")
    torch.manual_seed(int(os.environ["RANK"]))
    with torch.no_grad():
        for p in play.step.model.parameters():
            p.normal_()
    play.step.save(path)
    return {n: p.detach().numpy().copy() for n, p in play.step.model.named_parameters()}


def test_a_save_before_the_first_step_is_one_save_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first, second = ranks.run(saved_before_a_step, str(path), n=2)
    play = runs.prepare("sgd")
    play.step.load(path)
    for name, p in play.step.model.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), first[name])
        assert not np.array_equal(first[name], second[name])
    assert len(list(path.rglob("*.distcp"))) == 1


def refused_saves(path: str, bad: str) -> tuple[list[str], list[float]]:
    """What `save` says of a folder that cannot be, of `extra`, of a full disk on rank 1; then losses."""
    play, said = runs.prepare("sgd", "data=2 zero=3"), []
    play.losses(1)
    play.step.save(path, {"losses": [1.0]})

    def refused(where: str, extra: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError) as caught:
            play.step.save(where, extra)
        assert caught.value.why and caught.value.fix
        said.append(str(caught.value))

    refused(bad, {})
    refused(path, {"function": print} if os.environ["RANK"] == "1" else {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        refused(path, {"losses": [2.0]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    losses = play.losses(1)
    assert play.step.load(path) == {"losses": [1.0]} and play.step.num_steps == 1
    return said, losses


def test_what_fails_on_a_rank_is_said_on_all_and_costs_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    bad = tmp_path / "file"
    bad.write_text("")
    first, second = ranks.run(refused_saves, str(tmp_path / "saved"), str(bad), n=2)
    assert first[0] == second[0]
    folder, extra, full = first[0]
    assert f"cannot write the checkpoint {bad}" in folder and "exists" in folder.lower()
    assert "`extra` cannot be saved" in extra and "at   rank 1" in extra
    assert (
        "cannot write the checkpoint" in full and "at   rank 1" in full and "large" in full.lower()
    )
    runs.assert_same_losses(first[1], runs.on_one_device("sgd", 2)[0][1:])


def test_the_error_of_a_file_is_told_and_not_that_of_its_end(tmp_path: Path) -> None:
    """`torch.save` ends a large file that it cannot write with an error of its own."""
    model = nn.Linear(200, 200)
    step = tutti.distribute(lambda m, x: m(x).sum(), model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
            step.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.why == "File too large" and "ulimit -f" in caught.value.fix


@pytest.mark.parametrize("where", ["/proc/no", "/sys/no"])
def test_a_folder_that_cannot_be_made(where: str) -> None:
    play = runs.prepare("sgd")
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint {where}"):
        play.step.save(where)
    with pytest.raises(CheckpointError, match=f"cannot write {where}"):
        play.step.save(f"{where}.safetensors")


def test_a_flip_anywhere_in_a_model_file(tmp_path: Path) -> None:
    """300 flips: refused, or the weights are those that were saved."""
    play, path, chooses = runs.prepare("sgd"), tmp_path / "model.safetensors", random.Random(0)
    play.step.save(path)
    content, expected = path.read_bytes(), load(path.read_bytes())
    refused = 0
    for k in range(300):
        # the header is short: half of the flips are there
        bit = chooses.randrange(8 * (len(content) if k % 2 else 600))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            play.step.load(path)
        except CheckpointError:
            refused += 1
        for name, p in play.step.model.named_parameters():
            assert torch.equal(p, expected[name]), (k, bit)
    assert refused > 200


def test_a_model_file_of_another_program_has_no_checksum(tmp_path: Path) -> None:
    play, path = runs.prepare("sgd"), tmp_path / "model.safetensors"
    given = {n: torch.randn_like(p) for n, p in play.step.model.named_parameters()}
    save_file(given, path)
    play.step.load(path)
    assert all(torch.equal(p, given[n]) for n, p in play.step.model.named_parameters())


def test_a_model_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    play, path = runs.prepare("sgd"), tmp_path / "model.safetensors"
    play.step.save(path)
    content = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write"):
            play.step.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == content
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


def test_another_run_that_saves_there_is_named(tmp_path: Path) -> None:
    play, path = runs.prepare("sgd"), tmp_path / "saved"
    play.step.save(path)
    told = tmp_path / "told"

    def save() -> None:
        try:
            play.step.save(path)  # the lock is its parent's
        except CheckpointError as error:
            told.write_text(str(error))

    os.waitpid(forked(save), 0)
    assert f"process {os.getpid()} on" in told.read_text()
    play.step.save(path)


def test_a_run_that_saves_into_many_folders_keeps_few_descriptors(tmp_path: Path) -> None:
    play = runs.prepare("sgd")

    def descriptors_after(first: int, last: int) -> int:
        for k in range(first, last):
            play.step.save(tmp_path / f"step{k}.draft")
            (tmp_path / f"step{k}.draft").rename(tmp_path / f"step{k}")
        return len(os.listdir("/proc/self/fd"))

    before = descriptors_after(0, 10)
    assert descriptors_after(10, 40) == before


ALONE = """
import os, time, torch, tutti
from torch import nn

def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

model = nn.Linear(4, 4)
step = tutti.distribute(train_step, model, torch.optim.AdamW(model.parameters()))
step(torch.ones(4, 4))
if os.environ["RANK"] == "0":
    step.save("checkpoint")
time.sleep(1000)  # in something else
"""


def test_a_rank_that_saves_alone_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "5", "TMPDIR": str(tmp_path)}
    words = ["-m", "tutti", "run", "--layout", "data=2", "alone.py"]
    ended = run(words, env=env, cwd=tmp_path, timeout=120.0)
    assert ended.returncode != 0
    said = "CommError: cannot write the checkpoint checkpoint: rank 1 did not join rank 0"
    assert said in ended.stderr and "take it out of `if rank == 0:`" in ended.stderr
    assert "Timed out" not in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pth"])
def test_the_name_of_a_file_of_torch_is_refused(tmp_path: Path, name: str) -> None:
    """A save made a directory of that name, and a load of the file named no way to read it."""
    step, path = runs.prepare("sgd").step, tmp_path / name
    with pytest.raises(CheckpointError, match="a checkpoint is a directory") as caught:
        step.save(path)
    assert f'"{tmp_path / "model"}.safetensors"' in caught.value.fix and not path.exists()
    torch.save(step.model_state(), path)
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint") as caught:
        step.load(path)
    assert f'with step.whole(): model.load_state_dict(torch.load("{path}"))' in caught.value.fix


def test_arguments_of_another_type() -> None:
    step = runs.prepare("sgd").step
    calls: list[tuple[Callable[[], Any], str]] = [
        *((lambda x=x: step.load_state_dict(x), "state=") for x in (None, 3)),
        (lambda: step.load_state_dict({"a": 1}), "state\\['a'\\]=1 is of type int, not a tensor"),
        (lambda: step.save("unused", extra=3), "extra=3 is of type int, not a mapping"),  # type: ignore[arg-type]
        *((lambda x=x: step.save(x), "path=") for x in (None, 3, "")),
        *((lambda x=x: step.load(x), "path=") for x in (None, 3, "")),
    ]
    for call, said in calls:
        with pytest.raises(tutti.TuttiError, match=said) as caught:
            call()
        assert caught.value.fix
