"""Background saves: what they write is what a save of that step writes, and failures reach all ranks."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from captured_once import captured_once
from forked_writers import forked_writers
from ranks import Ranks
from resuming import small_run
from resuming.small_run import SmallRun, losses_of, with_writers
from tutti.checkpoint.manifest import MANIFEST
from tutti.environment import RUN_DIR
from tutti.errors import CheckpointError
from tutti.launch.records import Noted, read_record
from tutti.resuming import background_saves, run_folder
from tutti.resuming.background_writer import BackgroundWriter
from tutti.resuming.run_folder import RUN, look_at, numbers, path_of, remove_leftovers

SECONDS = 60.0


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Processes that write are copies of this one; all runs share a capture."""
    with forked_writers(), captured_once("small run"):
        yield


def contents(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by plain PyTorch."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {n: torch.empty(one.size, dtype=one.properties.dtype) for n, one in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def record(path: Path) -> dict[str, Any]:
    """The manifest, but what differs between two saves of the same state."""
    found = json.loads((path / MANIFEST).read_text())
    for name in ("sha256", "folder", "files", "index"):
        del found[name]
    del found["extra"][RUN]["time"]
    return found


def train(folder: str, layout: str, last: int, options: dict[str, Any]) -> list[float]:
    run = SmallRun(folder, layout, **options)
    with forked_writers(), captured_once("small run"), run.checkpoints:
        return run.until(last)


def the_writer(run: SmallRun) -> BackgroundWriter:
    background = run.checkpoints._saver._background
    assert background is not None
    return background._writer


def the_process(run: SmallRun) -> int:
    process = the_writer(run)._process
    assert process is not None
    return process.pid


@pytest.mark.parametrize(
    ("layout", "n"),
    [
        ("data=2 tensor=2 zero=1", 4),
        ("pipe=2 micro=2 data=2 zero=3", 4),
        ("data=3 zero=3", 3),
    ],
)
def test_a_background_save_has_the_content_of_a_save(
    ranks: Ranks, tmp_path: Path, layout: str, n: int
) -> None:
    options = {"every": 2, "keep": None}
    expected = ranks.run(train, str(tmp_path / "a"), layout, 6, options, n=n)
    options["asynchronous"] = True
    assert ranks.run(train, str(tmp_path / "b"), layout, 6, options, n=n) == expected
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b") == [2, 4, 6]
    for step in (2, 4, 6):
        here, there = (path_of(tmp_path / name, step) for name in "ab")
        assert record(here) == record(there)
        before, after = contents(here), contents(there)
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        assert look_at(tmp_path / "b", step, check=True).damage == ""
        assert {p.name for p in there.iterdir()} - {"lock"} == {
            p.name for p in here.iterdir() if not p.name.startswith("state")
        } - {"lock"} | {p.name for p in there.glob("state-*")}


def test_each_rank_writes_its_share(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks with equal weights write half of them each."""
    options = {"every": 2, "asynchronous": True}
    ranks.run(train, str(tmp_path / "run"), "data=2", 2, options, n=2)
    sizes = [p.stat().st_size for p in path_of(tmp_path / "run", 2).glob("state-*/*.distcp")]
    assert len(sizes) == 2 and min(sizes) > 0.35 * sum(sizes)


def test_a_run_goes_on_from_a_background_save(ranks: Ranks, tmp_path: Path) -> None:
    """On rank 0 a fresh process writes, as for users."""
    options, layout = {"every": 8, "asynchronous": True}, "data=2 zero=3"
    expected = ranks.run(losses_of, str(tmp_path / "a"), layout, 12, {"every": 8}, n=2)[0]
    given = str(tmp_path / "b"), layout
    found = ranks.run(with_writers, *given, 8, options, [0], n=2)
    assert found == [expected[:8]] * 2
    found = ranks.run(with_writers, *given, 12, options, [], n=2)
    assert found == [expected[8:]] * 2


def stopped(run: SmallRun) -> None:
    """Stop the process that writes: the save under way stays so."""
    run.one()  # starts it
    the_writer(run).outcome("a test", wait=True)
    os.kill(the_process(run), signal.SIGSTOP)


def test_the_state_of_the_save_is_that_of_its_step(tmp_path: Path) -> None:
    """Steps go on while their state is written."""
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True, keep=None)
    with run.checkpoints:
        run.until(1)
        stopped(run)
        run.until(4)
        expected = {n: x.clone() for n, x in run.step.state_dict().items()}
        run.until(5)
        assert run.checkpoints.steps() == [2]
        os.kill(the_process(run), signal.SIGCONT)
    assert run.checkpoints.steps() == [2, 4]
    found = contents(path_of(tmp_path / "run", 4))
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    assert any(not torch.equal(x, found[n]) for n, x in run.step.state_dict().items())


@pytest.mark.parametrize("wait", ["save", "close", "signal", "next"])
def test_what_waits_for_a_save_in_progress(tmp_path: Path, wait: str) -> None:
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True, keep=None)
    run.until(1)
    stopped(run)
    run.until(5)
    threading.Timer(0.3, os.kill, (the_process(run), signal.SIGCONT)).start()
    if wait == "save":
        run.checkpoints.save()
        assert run.checkpoints.steps() == [2, 4, 5]
    elif wait == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.one()[1]
        assert run.checkpoints.steps() == [2, 4, 6]
    elif wait == "next":
        run.one()  # step 6 is due
        assert 4 in run.checkpoints.steps()
    run.checkpoints.close()
    assert run.checkpoints.steps()[:2] == [2, 4]


def failing(
    folder: str, layout: str, spoil: str, environment: dict[str, str]
) -> list[tuple[int, str]]:
    """The steps after which a rank's `tick` raised, with the messages; a save fails in between."""
    rank, found, begun = dist.get_rank(), [], time.monotonic()
    full = Path(folder) / "full"

    def removed(path: Path) -> None:
        if full.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        remove_leftovers(path)

    lacks_room = mock.patch.object(run_folder, "remove_leftovers", removed)
    with mock.patch.dict(os.environ, environment), lacks_room, forked_writers():
        run = SmallRun(folder, layout, every=4, keep=None, asynchronous=True)
        with run.checkpoints:
            run.until(5)
            run.checkpoints.save()
            if spoil == "killed" and rank == 1:
                os.kill(the_process(run), signal.SIGKILL)
            elif spoil == "disk" and rank == 0:
                full.touch()
            while not found and time.monotonic() < begun + SECONDS:
                try:
                    run.one()
                except CheckpointError as error:
                    found.append((run.step.num_steps, str(error)))
            if rank == 0:
                full.unlink(missing_ok=True)
            dist.barrier()
            run.until(run.step.num_steps + 5)
    return found


@pytest.mark.parametrize("environment", [{}, {"TUTTI_SHARED_MEMORY": "off"}])
@pytest.mark.parametrize("spoil", ["killed", "disk"])
def test_all_ranks_raise_the_error_of_a_failed_save_after_the_same_step(
    ranks: Ranks, tmp_path: Path, spoil: str, environment: dict[str, str]
) -> None:
    """Also as ranks of several hosts."""
    folder = tmp_path / "run"
    found = ranks.run(failing, str(folder), "data=2 zero=3", spoil, environment, n=2)
    assert found[0] == found[1] and len(found[0]) == 1
    step, message = found[0][0]
    assert step >= 8
    assert "step-00000008" in message and ("signal 9" in message) == (spoil == "killed")
    steps = numbers(folder)
    assert steps[:2] == [4, 5] and 8 not in steps and steps[-1] > step
    assert all(not look_at(folder, one, check=True).damage for one in steps)
    assert not [path for path in folder.iterdir() if path.name.startswith(".step")]


def test_a_state_that_cannot_be_saved_is_an_error_at_the_next_step(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True)
    with run.checkpoints:
        run.until(2)
        run.notes["hook"] = print
        run.until(4)
        with pytest.raises(CheckpointError, match=r"notes.*hook"):
            run.one()
        del run.notes["hook"]
        run.until(6)
    assert run.checkpoints.steps() == [2, 6]


def test_a_failure_after_the_last_step_is_raised_at_the_end(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True)
    run.until(1)
    stopped(run)
    run.until(4)
    os.kill(the_process(run), signal.SIGKILL)
    with pytest.raises(CheckpointError, match="signal 9"):
        run.checkpoints.close()
    assert run.checkpoints.steps() == [2]


def test_a_step_that_waits_for_a_save_is_told_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_saves, "_LONG_SECONDS", -1.0)
    run = SmallRun(tmp_path / "run", every=1, asynchronous=True)
    with (
        pytest.warns(UserWarning, match="saves follow each other too soon") as heard,
        run.checkpoints,
    ):
        run.until(2)
    places = [x.filename for x in heard if "too soon" in str(x.message)]
    assert places == [small_run.__file__]


def test_an_exception_of_the_loop_is_not_hidden_by_a_failed_save(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True)
    with (
        pytest.warns(UserWarning, match="signal 9"),
        pytest.raises(ZeroDivisionError),
        run.checkpoints,
    ):
        run.until(1)
        stopped(run)
        run.until(4)
        os.kill(the_process(run), signal.SIGKILL)
        raise ZeroDivisionError


def test_a_script_that_ends_without_close_writes_its_save(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True)
    run.until(2)
    pid = the_process(run)
    run.checkpoints._end()  # as at the end of the interpreter
    assert numbers(tmp_path / "run") == [2]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_save_that_is_lost_at_the_end_is_told_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that knows of it may be one whose output nobody sees."""
    run = SmallRun(tmp_path / "run", every=2, asynchronous=True)
    run.until(1)
    stopped(run)
    run.until(4)
    os.kill(the_process(run), signal.SIGKILL)
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path))
    run.checkpoints._end()
    noted = read_record(tmp_path, Noted, 0)
    assert noted is not None and len(noted.lines) == 1
    assert noted.lines[0].startswith(
        "a save in the background is lost: cannot write the checkpoint "
    )


def test_the_folder_is_locked_until_the_process_of_a_killed_run_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            run = SmallRun(folder, every=2, asynchronous=True)
            run.until(1)
            stopped(run)
            run.until(4)
            (tmp_path / "draft").write_text(str(the_process(run)))
            (tmp_path / "draft").rename(tmp_path / "writer")
            time.sleep(SECONDS)
        os._exit(0)
    until = time.monotonic() + SECONDS
    while not (tmp_path / "writer").exists() and time.monotonic() < until:
        time.sleep(0.01)
    writer = int((tmp_path / "writer").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    run = SmallRun(folder, every=1)
    with run.checkpoints:
        assert run.checkpoints.restore() == 2
        begin = time.monotonic()
        run.one()
        assert time.monotonic() - begin > 0.2  # it waited for the process
    assert numbers(folder) == [2, 3]
    assert {path.name[:5] for path in folder.iterdir()} == {"lock", "step-"}


def counts() -> tuple[int, int, int]:
    """Descriptors, threads, and shared pages of this process."""
    gc.collect()
    shared = int(Path("/proc/self/statm").read_text().split()[2])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared


def test_many_saves_leave_nothing(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every=1, asynchronous=True, keep=2)
    run.step(torch.randn(12, 8), torch.randn(12, 4))
    before = counts()
    with run.checkpoints:
        run.until(5)
        run.checkpoints.save()
        first, process = counts(), the_process(run)
        theirs = len(os.listdir(f"/proc/{process}/fd"))
        run.until(60)
        run.checkpoints.save()
        last = counts()
        assert last[:2] == first[:2] and last[2] - first[2] < 256
        assert len(os.listdir(f"/proc/{process}/fd")) == theirs
    after = counts()
    assert after[:2] == (before[0] + 1, before[1])  # the lock of the folder
    assert not Path(f"/proc/{process}").exists()
    assert run.checkpoints.steps() == [59, 60]


def test_small_states_and_runs_without_a_rhythm_are_saved_at_once(tmp_path: Path) -> None:
    for options in ({"every": 2}, {"asynchronous": True}, {"every": 2, "asynchronous": False}):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = SmallRun(tmp_path / "run", **options)
        with run.checkpoints:
            run.until(2)
            run.checkpoints.save()
            assert run.checkpoints._saver._background is None
            assert run.checkpoints.steps() == [2]


def test_how_to_save_is_decided_once(tmp_path: Path) -> None:
    """Later calls of `tick` do not look at the state."""
    for options in ({}, {"asynchronous": True}, {"asynchronous": False}):
        run = SmallRun(tmp_path / "run", every=100, **options)
        with run.checkpoints:
            run.one()
            with mock.patch("tutti.resuming.saver.state_share", side_effect=AssertionError):
                run.until(4)


def test_replicas_save_at_once(ranks: Ranks, tmp_path: Path) -> None:
    options = {"every": 2, "asynchronous": True}
    layout = "replica=2 sync=diloco(every=2)"
    ranks.run(train, str(tmp_path / "run"), layout, 4, options, n=2)
    assert numbers(tmp_path / "run") == [2, 4]
