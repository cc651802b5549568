"""One run at a time saves into a folder; the lock ends with its process."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from checkpoint import saved
from checkpoint.test_folder import in_a_child
from tutti.checkpoint.folder import open_folder
from tutti.errors import CheckpointError


def test_another_process_is_refused_with_the_owner(tmp_path: Path) -> None:
    lock = open_folder(tmp_path / "saved")
    told = tmp_path / "told"

    def act() -> None:
        try:
            open_folder(tmp_path / "saved")
        except CheckpointError as error:
            told.write_text(str(error))
            raise

    assert in_a_child(act) == 3
    assert f"process {os.getpid()} on {os.uname().nodename} holds it since" in told.read_text()
    assert "another run saves into" in told.read_text()
    lock.close()


def test_steps_of_one_process_share_it_and_the_last_one_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first, second = open_folder(path), open_folder(path)
    del first
    gc.collect()
    assert in_a_child(lambda: saved.save(path, 1)) == 3
    del second
    gc.collect()
    assert in_a_child(lambda: saved.save(path, 1)) == 0


def test_a_killed_owner_keeps_nothing_though_its_children_live(tmp_path: Path) -> None:
    path, ready = tmp_path / "saved", tmp_path / "ready"
    owner = os.fork()
    if not owner:
        lock = open_folder(path)
        worker = os.fork()  # as a data loader's
        if not worker:
            time.sleep(60.0)
            os._exit(0)
        ready.write_text(str(worker))
        time.sleep(60.0)
        lock.close()
        os._exit(0)
    until = time.monotonic() + 30.0
    while not (ready.exists() and ready.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    try:
        with pytest.raises(CheckpointError, match=f"process {owner} on"):
            open_folder(path)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        saved.save(path, 1)
        assert saved.number_of(path) == 1
    finally:
        os.kill(int(ready.read_text()), signal.SIGKILL)


def test_a_new_folder_with_the_number_of_a_removed_one_is_locked_anew(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first = open_folder(path)
    shutil.rmtree(path)
    second = open_folder(path)
    assert not first.is_of(path) and second.is_of(path)
    assert in_a_child(lambda: saved.save(path, 1)) == 3
