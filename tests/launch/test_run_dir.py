"""The directory of a run does not outlive it, also where the launcher is killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import context
from tutti.launch import run_dir, worker
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


@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=20"])
def test_a_disk_without_room_is_named_before_a_rank_starts(options: str, tmp_path: Path) -> None:
    """In a mount namespace of its own, as a container has one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("cannot make a mount namespace here")
    mount = f'mount -t tmpfs -o {options} none "$TMPDIR" && "$@"; code=$?; ls "$TMPDIR"; exit $code'
    words = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-m", "tutti", "run"]
    done = subprocess.run(
        [*words, "-n", "2", "--layout", "data=2", __file__],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and not done.stdout, done.stdout
    assert f"no room in {tmp_path} for the small files" in done.stderr and "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_finds_no_room_any_more_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with worker._room_in(tmp_path / "run"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert codes == [2]
    said = capfd.readouterr().err
    assert said.startswith(f"no room in {tmp_path} ") and "why  No space left on device" in said


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
