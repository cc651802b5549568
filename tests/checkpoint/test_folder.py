"""Saving into one folder again and again: at every moment the folder holds a whole checkpoint."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from checkpoint import saved
from tutti.checkpoint.unanimous import Unanimous
from tutti.errors import CheckpointError, CommError

# Python tells of these before it does them: whatever a save does to a file.
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
TAKES_ROOM = {"open", "os.rename", "os.mkdir"}


def in_a_child(act: Callable[[], None]) -> int:
    """The exit code of a forked process that does `act`, minus the number of a signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            act()
            code = 0
        except (CheckpointError, OSError):  # the latter of `open_folder`
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dies_before_change(number: int, path: Path) -> None:
    """This process ends without a word before the `number`-th change below `path`."""

    def dies(change: int, _: str) -> None:
        if change == number:
            os._exit(9)

    at_changes(path, dies)


def fails_at_change(number: int, path: Path, *, once: bool) -> None:
    """The `number`-th change below `path` raises; so do all later ones that take room, unless `once`."""

    def fails(change: int, event: str) -> None:
        if change == number or (change > number and not once and event in TAKES_ROOM):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    at_changes(path, fails)


def at_changes(path: Path, act: Callable[[int, str], None]) -> None:
    """Call `act` with the number and the event of each change below `path`, before it is done."""
    changes = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        if event not in CHANGES or not str(arguments[0]).startswith(str(path)):
            return
        if event == "open" and not isinstance(arguments[1], str):
            flags = arguments[2]
            assert isinstance(flags, int)
            if not flags & os.O_CREAT:
                return
        changes += 1
        act(changes, event)

    sys.addaudithook(hook)


def test_a_save_that_dies_before_any_of_its_changes(tmp_path: Path) -> None:
    """Every moment of the second save: the first one is there until the second one is."""
    found, number = [], 0
    while True:
        number += 1
        path = tmp_path / f"saved{number}"
        saved.save(path, 1)

        def act(path: Path = path, number: int = number) -> None:
            dies_before_change(number, path)
            saved.save(path, 2)

        code = in_a_child(act)
        found.append(saved.number_of(path))
        saved.save(path, 3)  # a later save is not in the way of what is left
        assert saved.number_of(path) == 3
        assert sum(f.name.startswith("state-") for f in path.iterdir()) == 1
        if code == 0:
            break
        assert code == 9
    assert number > 10
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2


@pytest.mark.parametrize("once", [True, False])
def test_a_save_of_which_any_change_fails(once: bool, tmp_path: Path) -> None:
    """Every moment of the second save again: an error then leaves the first or the second one, whole."""
    found, number = [], 0
    while True:
        number += 1
        path = tmp_path / f"saved{number}"
        saved.save(path, 1)

        def act(path: Path = path, number: int = number) -> None:
            fails_at_change(number, path, once=once)
            saved.save(path, 2)

        code = in_a_child(act)
        found.append((saved.number_of(path), plain_number_of(path)))
        saved.save(path, 3)
        assert saved.number_of(path) == plain_number_of(path) == 3
        if code == 0 and found[-1] == (2, 2) and number > 15:
            break
        assert code in (0, 3)
    # The manifest is replaced first, then the index that plain PyTorch reads.
    assert {(1, 1), (2, 2)} <= set(found) <= {(1, 1), (2, 1), (2, 2)}


def test_a_save_that_loses_a_rank_once_it_is_visible_stays(tmp_path: Path) -> None:
    """The first rank has replaced the manifest; then another one is killed before all have met."""

    class Losing(Unanimous):
        def lead(self, what: str, act: Callable[[], str]) -> str:
            text = super().lead(what, act)
            if saved.number_of(path) == 2:
                raise CommError("rank 1 is gone; it left rank 0 in a save or a load")
            return text

    path = tmp_path / "saved"
    saved.save(path, 1)
    with pytest.raises(CommError, match="rank 1 is gone"):
        saved.save(path, 2, Losing(None))
    assert saved.number_of(path) == 2


def test_a_first_save_that_dies_leaves_no_checkpoint(tmp_path: Path) -> None:
    for number in (2, 4, 6):
        path = tmp_path / f"saved{number}"

        def act(path: Path = path, number: int = number) -> None:
            dies_before_change(number, path)
            saved.save(path, 2)

        assert in_a_child(act) == 9
        with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
            saved.load(path)
        saved.save(path, 3)
        assert saved.number_of(path) == 3


def kills(path: Path, count: int, seed: int = 0) -> int:
    """Kill a process that saves without end, `count` times; the number of the last whole save."""
    chooses, newest = random.Random(seed), 0
    saved.save(path, newest)
    began = time.monotonic()
    saved.save(path, newest)
    seconds = time.monotonic() - began
    for _ in range(count):
        pid = os.fork()
        if not pid:
            try:
                while True:
                    newest += 1
                    saved.save(path, newest)
            finally:
                os._exit(1)
        time.sleep(chooses.uniform(0.0, 4 * seconds))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = saved.number_of(path)
        assert found >= newest
        seconds *= 1.2 if found == newest else 1.0  # other processes delay saves, too
        newest = found
    return newest


def test_kills_at_random_moments(tmp_path: Path) -> None:
    assert kills(tmp_path / "saved", 30) > 0


def test_files_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    path = tmp_path / "saved"
    saved.save(path, 1)
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(fd: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def noted_replace(self: Path, target: Path) -> Path:
        done.append(("replace", str(target)))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    saved.save(path, 2)
    (folder,) = path.glob("state-*")
    visible = done.index(("replace", str(path / "tutti.json")))
    before = [name for what, name in done[:visible] if what == "fsync"]
    written = {str(f) for f in folder.iterdir()}
    assert {n.removesuffix(".tmp") for n in before} >= written
    assert str(folder) in before and str(path / "tutti.json.new") in before
    assert ("fsync", str(path)) in done[visible:]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved.save(path, 1)

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            saved.save(path, 2)
        except CheckpointError as error:
            assert "cannot write the checkpoint" in error.what and error.why and error.fix
            raise

    assert in_a_child(act) == 3
    assert saved.number_of(path) == 1
    assert len(list(path.glob("state-*"))) == 1
    saved.save(path, 3)
    assert saved.number_of(path) == 3


def plain_number_of(path: Path) -> int:
    """Which save plain PyTorch reads, after looking that all of it is of that save."""
    found = {n: torch.zeros_like(x) for n, x in saved.state(0).items()}
    state_dict_loader.load(found, checkpoint_id=str(path), no_dist=True)
    number = int(found["num_steps"])
    expected = saved.state(number)
    assert all(torch.equal(found[n], x) for n, x in expected.items())
    return number


def test_plain_pytorch_reads_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for number in (1, 2):
        saved.save(path, number)
    assert plain_number_of(path) == 2


def test_a_checkpoint_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"another program's")
    with pytest.raises(CheckpointError, match="holds a checkpoint of another program"):
        saved.save(tmp_path, 1)
    assert [f.name for f in tmp_path.iterdir() if f.name != "lock"] == [".metadata"]


def test_a_damaged_manifest_does_not_cost_the_files_that_it_named(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved.save(path, 1)
    (folder,) = path.glob("state-*")
    (path / "tutti.json").write_text("{")

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        saved.save(path, 2)

    assert in_a_child(act) == 3
    assert folder.exists()
