"""Runs that are killed at random moments: a whole checkpoint remains, and the losses are those of no kill."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from launch.processes import lives
from ranks import Ranks
from resuming.small_run import MOST_STEPS, SmallRun
from resuming.test_stops import RUN_SECONDS, finished, losses, saved, started, undisturbed, wait_for
from tutti.launch.records import read_script
from tutti.resuming.run_folder import look_at, numbers

# `TUTTI_TEST_KILLS=200` for a longer look.
NUM_KILLS = int(os.environ.get("TUTTI_TEST_KILLS", "8"))
CHILD_SECONDS, FIRST = 60.0, 2
LAYOUT = "data=2 zero=3"


def prepared(directory: Path) -> SmallRun:
    """A run that has captured its step; copies of this process go on from it, or from its checkpoints."""
    directory.mkdir()
    run = SmallRun(directory / "run", every=1, keep=2)
    for _ in range(FIRST):
        run.step(torch.randn(12, 8), torch.randn(12, 4))
    return run


def train(run: SmallRun, directory: Path, last: int) -> None:
    """Go on to step `last`; a save after each step."""
    if run.checkpoints.restore() is None:
        torch.manual_seed(1)
    with (directory / "losses.0").open("a") as lines:
        run.tell_history(lines)
        while run.step.num_steps < last:
            loss, _ = run.one()
            print(run.step.num_steps, loss.hex(), file=lines, flush=True)


def forked(run: SmallRun, directory: Path, last: int) -> int:
    """The process id of a copy of this one that trains."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            train(run, directory, last)
            code = 0
        finally:
            os._exit(code)
    return pid


def newest(directory: Path) -> int:
    return max(saved(directory), default=0) if (directory / "run").exists() else 0


@pytest.mark.timeout(120 + 10 * NUM_KILLS)
def test_killed_saves_leave_a_whole_checkpoint_and_the_same_losses(tmp_path: Path) -> None:
    runs = {name: prepared(tmp_path / name) for name in "ab"}
    directory, chance, last = tmp_path / "b", random.Random(0), 0
    for _ in range(NUM_KILLS):
        pid = forked(runs["b"], directory, MOST_STEPS - 1)
        until = time.monotonic() + CHILD_SECONDS
        while newest(directory) <= last and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.06))  # about two saves
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        steps = numbers(directory / "run")
        found = [look_at(directory / "run", step, check=True) for step in steps]
        assert found and [one.damage for one in found] == [""] * len(found)
        assert steps[-1] > last
        last = steps[-1]
    end = last + 3
    for name, run in runs.items():
        os.waitpid(forked(run, tmp_path / name, end), 0)
    assert losses(directory) == losses(tmp_path / "a")
    assert sorted(losses(directory)) == [*range(FIRST + 1, end + 1)]
    names = {path.name for path in (directory / "run").iterdir()}
    assert names == {"lock", f"step-{end - 1:08d}", f"step-{end:08d}"}


@pytest.mark.parametrize("victim", ["rank 1", "launcher"])
def test_a_killed_run_on_ranks_goes_on_with_the_same_losses(
    ranks: Ranks, tmp_path: Path, victim: str
) -> None:
    process = started(tmp_path, LAYOUT, 0.02)
    wait_for(tmp_path, random.randrange(5, 15), process)
    (run_dir,) = (tmp_path / "tmp").glob("tutti-*")
    pids = [pid for rank in range(2) if (pid := read_script(run_dir, rank))]
    os.kill(process.pid if victim == "launcher" else pids[1], signal.SIGKILL)
    process.communicate(timeout=RUN_SECONDS)
    while any(map(lives, pids)):  # they die with the launcher, but not at once
        time.sleep(0.05)
    assert saved(tmp_path) and process.returncode != 0
    assert finished(ranks, tmp_path, LAYOUT) == undisturbed(ranks, tmp_path, LAYOUT)
