"""The directory of a run does not outlive it, also where the launcher is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ranks import context
from tutti.launch import run_dir
from tutti.launch.run_dir import RunDir, remove_stale

SECONDS = 30.0


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def wait_until_gone(path: Path) -> None:
    until = time.monotonic() + SECONDS
    while path.exists():
        assert time.monotonic() < until, list(path.rglob("*"))
        time.sleep(0.05)


def test_it_is_private_and_goes_with_all_in_it(parent: Path) -> None:
    made = RunDir()
    assert made.path.parent == parent and made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "logs").mkdir()
    (made.path / "logs" / "one").write_text("text")
    made.remove()
    assert not list(parent.iterdir())


def killed_launcher(parent: Path) -> None:
    import tempfile

    tempfile.tempdir = str(parent)
    (RunDir().path / "file").write_text("text")
    os.kill(os.getpid(), signal.SIGKILL)


def killed_launcher_without_a_shell(parent: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("/bin/sh")

    run_dir.subprocess.Popen = refuse  # type: ignore[assignment, misc]
    killed_launcher(parent)


def test_a_cleaner_removes_that_of_a_killed_launcher(parent: Path) -> None:
    process = context().Process(target=killed_launcher, args=(parent,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL
    wait_until_gone(next(iter(parent.glob("tutti-*")), parent / "gone"))


def test_the_next_run_removes_what_is_left(parent: Path) -> None:
    process = context().Process(target=killed_launcher_without_a_shell, args=(parent,))
    process.start()
    process.join(SECONDS)
    (left,) = parent.glob("tutti-*")
    other = parent / "tutti-of-somebody-else"  # no run's: it has no owner
    other.mkdir()
    elsewhere = parent / "tutti-elsewhere"  # of another host on a file system that both mount
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("1 2 another host")
    odd = parent / "tutti-odd"
    odd.mkdir()
    (odd / "owner").write_text("no pid")
    mine = RunDir()  # a run that lives
    assert not left.exists()
    remove_stale(parent)
    assert {other, elsewhere, odd, mine.path} == set(parent.iterdir())
    mine.remove()


def test_a_process_that_has_the_number_of_a_dead_launcher_is_not_it(parent: Path) -> None:
    left = parent / "tutti-left"
    left.mkdir()
    pid, started, host = run_dir._owner(os.getpid()).split(" ", 2)
    (left / "owner").write_text(f"{pid} {int(started) - 1} {host}")
    remove_stale(parent)
    assert not left.exists()
