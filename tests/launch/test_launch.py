"""`tutti run` starts ranks, stops all when one fails, and says which, why, and who waited where."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from forked import Started, started
from launch.processes import MOST_SECONDS, lives

PROGRAM = Path(__file__).parent / "programs.py"
SOURCE = PROGRAM.read_text().splitlines()
WAITS_AT = f"programs.py:{1 + next(i for i, s in enumerate(SOURCE) if '# here ranks wait' in s)}"
STUCK_AT = f"programs.py:{1 + next(i for i, s in enumerate(SOURCE) if '# the line where' in s)}"
STOP_SECONDS = 15.0
START_SECONDS = 90.0


def start(
    wrong: str, pids: Path, num_ranks: int = 3, *, fresh: bool = False, **environment: str
) -> Started:
    words = ["-m", "tutti", "run", "-n", str(num_ranks), str(PROGRAM), wrong, str(pids)]
    env = {**os.environ, "TMPDIR": str(pids), "OMP_NUM_THREADS": "1", **environment}
    return started(words, env=env, cwd=Path.cwd(), fresh=fresh)


def finish(process: Started, seconds: float = START_SECONDS) -> tuple[str, str]:
    try:
        return process.communicate(timeout=seconds)
    finally:
        process.kill()


def pids_of(directory: Path) -> list[int]:
    return [int(path.read_text()) for path in directory.glob("*.pid")]


def living(directory: Path) -> list[int]:
    return [pid for pid in pids_of(directory) if lives(pid)]


def wait_for_steps(process: Started, directory: Path, number: int) -> None:
    """Until the ranks are in their steps, and so many processes have noted their pid."""
    assert process.stdout is not None
    assert process.stdout.readline() == "rank 0 at step 3\n"
    until = time.monotonic() + START_SECONDS
    while len(pids_of(directory)) < number:
        assert time.monotonic() < until, "not every process started"
        time.sleep(0.05)


def wait_for_nobody(directory: Path) -> None:
    """Until none of the processes lives."""
    until = time.monotonic() + STOP_SECONDS
    while living(directory) and time.monotonic() < until:
        time.sleep(0.05)
    assert not living(directory)


def test_only_rank_0_prints_and_nothing_is_left(tmp_path: Path) -> None:
    process = start("nothing", tmp_path, num_ranks=2, fresh=True)
    out, err = finish(process)
    assert process.returncode == 0, err
    assert out.splitlines() == ["rank 0 at step 3", "rank 0 done: 2"]
    assert err.splitlines() == ["rank 0 says so"]
    assert not living(tmp_path)
    assert not list(tmp_path.glob("tutti-*"))


def test_a_killed_rank_is_named_with_the_collective_that_waited(tmp_path: Path) -> None:
    process = start("kill", tmp_path)
    assert process.stdout is not None
    process.stdout.readline()  # step 3: now rank 1 dies
    begin = time.monotonic()
    _, err = finish(process)
    assert time.monotonic() - begin < MOST_SECONDS + 10.0  # it waits until the others sleep
    assert process.returncode == 1
    line = next(line for line in err.splitlines() if line.startswith("CommError"))
    assert "rank 1 died (signal 9)" in line
    for rank in (0, 2):
        assert f"rank {rank} waited in all_reduce over data (8 B) at " in line
    assert line.count(WAITS_AT) == 2
    assert "Traceback" not in err
    assert not living(tmp_path)


def test_a_traceback_appears_once_with_its_rank(tmp_path: Path) -> None:
    process = start("raise", tmp_path)
    _, err = finish(process)
    assert process.returncode == 1
    assert err.count("Traceback") == 1
    assert "[rank 1] Traceback (most recent call last):" in err
    assert err.count("ValueError: a batch of the wrong kind") == 2  # with the first line
    assert "runpy" not in err and "worker.py" not in err
    first = "rank 1 failed: ValueError: a batch of the wrong kind; rank 0 waited in all_reduce over data"
    assert err.startswith(first)
    assert not living(tmp_path)


def test_a_mistake_that_tutti_names_needs_no_traceback(tmp_path: Path) -> None:
    process = start("library", tmp_path, num_ranks=2)
    _, err = finish(process)
    assert process.returncode == 2
    assert "[rank 1] ShardingError: cannot split\n  why  a test\n  fix  nothing" in err
    assert "Traceback" not in err


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    process = start("exit", tmp_path, num_ranks=2)
    _, err = finish(process)
    assert process.returncode == 1
    assert "CommError: rank 1 left early (exit code 0); rank 0 waited in all_reduce" in err


def test_a_rank_that_leaves_before_the_ranks_meet_ends_the_run(tmp_path: Path) -> None:
    process = start("never", tmp_path, num_ranks=2)
    _, err = finish(process)
    assert process.returncode == 1
    waited = "rank 0 waited in init_process_group at tests/launch/programs.py:"
    assert err.startswith(f"CommError: rank 1 left early (exit code 0); {waited}"), err


def test_ranks_that_never_meet_end_well(tmp_path: Path) -> None:
    process = start("nobody", tmp_path, num_ranks=2)
    assert (finish(process), process.returncode) == (("", ""), 0)


def test_a_rank_that_does_not_come_is_shown_where_it_is(tmp_path: Path) -> None:
    process = start("stuck", tmp_path, num_ranks=2, TIMEOUT_ONCE_STARTED="3")
    _, err = finish(process)
    assert process.returncode == 1
    assert "rank 1 did not join rank 0 in all_reduce over data (8 B) within 3 s" in err
    assert "rank 1 was at " in err and STUCK_AT in err
    assert not living(tmp_path)


def test_ctrl_c_lets_a_script_save(tmp_path: Path) -> None:
    process = start("save", tmp_path, num_ranks=2)
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert process.returncode == 0, err
    assert "rank 0 saved" in out
    assert not living(tmp_path)


def test_ctrl_c_ends_a_script_that_does_not_listen(tmp_path: Path) -> None:
    process = start("sleep", tmp_path, num_ranks=2)
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "Error" not in err
    assert not living(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    process = start("sleep", tmp_path, num_ranks=2)
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(number)
    finish(process)
    wait_for_nobody(tmp_path)


def test_a_killed_rank_leaves_no_child_behind(tmp_path: Path) -> None:
    process = start("fork", tmp_path, num_ranks=2)
    wait_for_steps(process, tmp_path, 4)
    os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
    _, err = finish(process)
    assert "rank 1 died (signal 9)" in err
    wait_for_nobody(tmp_path)
