"""A signal ends a run after one more step and one save, on all ranks after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from captured_once import captured_once
from forked import Forked
from ranks import Ranks
from resuming.small_run import SmallRun, history_of, losses_of
from tutti.launch.records import read_script
from tutti.resuming import stop_signals

SCRIPT = Path(__file__).parent / "small_run.py"
STEPS = 24
START_SECONDS, RUN_SECONDS = 120.0, 120.0


def environment(directory: Path) -> dict[str, str]:
    (directory / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}


def started(
    directory: Path, layout: str, seconds: float = 0.05, *, steps: int = STEPS, **more: str
) -> Forked:
    """A run in a process of its own, under the launcher if it has a layout."""
    words = ["-m", "tutti", "run", "--layout", layout] if layout else []
    words += [str(SCRIPT), str(directory / "run"), str(steps), str(seconds)]
    return Forked(words, env=environment(directory) | more, cwd=directory)


def losses(directory: Path, rank: int = 0) -> dict[int, str]:
    """The losses of a rank by step, the last of each."""
    path = directory / f"losses.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines if line.count(" "))}


def wait_for(directory: Path, step: int, process: Forked, rank: int = 0) -> None:
    until = time.monotonic() + START_SECONDS
    while max(losses(directory, rank), default=0) < step and time.monotonic() < until:
        assert process.poll() is None, process.communicate(timeout=10)
        time.sleep(0.005)


def saved(directory: Path) -> list[int]:
    names = (directory / "run").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in names)


def undisturbed(ranks: Ranks, directory: Path, layout: str) -> dict[int, str]:
    """The losses of a run of the same steps that nobody stops, on ranks of a pool."""
    first, _ = ranks.run(
        losses_of, str(directory / "undisturbed"), layout, STEPS, {"every": 4}, n=2
    )
    return {k + 1: loss.hex() for k, loss in enumerate(first)}


def finished(ranks: Ranks, directory: Path, layout: str) -> dict[int, str]:
    """The losses of a run that ranks of a pool end, those that it has printed among them."""
    first, _ = ranks.run(history_of, str(directory / "run"), layout, STEPS, {"every": 4}, n=2)
    return {k + 1: loss.hex() for k, loss in enumerate(first)} | losses(directory)


@pytest.mark.parametrize(
    ("layout", "number", "code"),
    [
        ("data=2 zero=3", signal.SIGINT, 0),
        ("data=2", signal.SIGTERM, 143),
        ("replica=2 sync=diloco(every=4)", signal.SIGINT, 0),
    ],
)
def test_a_run_that_is_told_to_end_goes_on_as_if_it_had_not(
    ranks: Ranks, tmp_path: Path, layout: str, number: int, code: int
) -> None:
    expected = undisturbed(ranks, tmp_path, layout)
    process = started(tmp_path, layout)
    wait_for(tmp_path, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == code, out + err
    last = max(losses(tmp_path))
    assert last == max(losses(tmp_path, 1)) == saved(tmp_path)[-1] < STEPS
    if number == signal.SIGTERM:
        said = f"ended by SIGTERM, sent to the launcher; ranks 0, 1 saved step {last} and ended\n"
        assert err == said
    assert finished(ranks, tmp_path, layout) == expected


@pytest.mark.parametrize("seconds", [0.002, 0.1])
def test_ranks_without_shared_memory_end_after_the_same_step(
    tmp_path: Path, seconds: float
) -> None:
    """As ranks of several hosts; with short steps they vote less often."""
    process = started(tmp_path, "data=2", seconds, steps=5000, TUTTI_SHARED_MEMORY="off")
    wait_for(tmp_path, 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, out + err
    last = max(losses(tmp_path))
    assert last == max(losses(tmp_path, 1)) == saved(tmp_path)[-1] < 5000


@pytest.mark.parametrize("sync", ["step", "async"])
def test_servers_serve_until_the_workers_have_saved(tmp_path: Path, sync: str) -> None:
    process = started(tmp_path, f"replica=2 server=1 sync={sync}")
    wait_for(tmp_path, 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130 and "Error" not in err, out + err
    # Worker 1 saves its last step, too, where worker 0 has left before.
    assert saved(tmp_path)[-1] in (max(losses(tmp_path)), max(losses(tmp_path, 1)))
    assert saved(tmp_path)[-1] < STEPS


def test_a_worker_that_is_lost_under_step_leaves_no_step_without_its_rows(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The others end with an error, and the checkpoint goes on with the losses of an undisturbed run."""
    process = started(tmp_path, "replica=2 server=1 sync=step", TUTTI_LEASE="2")
    wait_for(tmp_path, 6, process)
    (run_dir,) = (tmp_path / "tmp").glob("tutti-*")
    pid = read_script(run_dir, 1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1 and "rank 1 died (signal 9)" in err, out + err
    found, expected = losses(tmp_path), undisturbed(ranks, tmp_path, "data=2")
    assert max(found) < STEPS and saved(tmp_path)[-1] >= 4
    for some in (found, finished(ranks, tmp_path, "data=2")):
        for k, loss in some.items():
            assert float.fromhex(loss) == pytest.approx(float.fromhex(expected[k]), rel=1e-5), k


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_the_first_remaining_worker_saves(tmp_path: Path, number: int | None) -> None:
    process = started(
        tmp_path, "replica=2 server=1 sync=async", steps=40 if number is None else 400
    )
    wait_for(tmp_path, 5, process)
    (run_dir,) = (tmp_path / "tmp").glob("tutti-*")
    pid = read_script(run_dir, 0)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(tmp_path, max(losses(tmp_path)) + 8, process, rank=1)
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == (0 if number is None else 143), out + err
    last = max(losses(tmp_path, 1))
    assert saved(tmp_path)[-1] == last > max(losses(tmp_path))


@pytest.mark.parametrize(
    ("layout", "victim"),
    [("replica=2", 1), ("replica=2 data=2 zero=3", 3)],
)
def test_replicas_end_well_after_the_loss_of_one(tmp_path: Path, layout: str, victim: int) -> None:
    process = started(tmp_path, f"{layout} sync=diloco(every=4)", TUTTI_LEASE="3", steps=200)
    wait_for(tmp_path, 5, process)
    (run_dir,) = (tmp_path / "tmp").glob("tutti-*")
    pid = read_script(run_dir, victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(tmp_path, max(losses(tmp_path)) + 20, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert "CommError" not in err and "Traceback" not in err, out + err
    assert saved(tmp_path)[-1] == max(losses(tmp_path)) < 200


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_script_that_goes_on_ends_as_the_signal_ends_it(
    tmp_path: Path, number: int, code: int
) -> None:
    process = started(tmp_path, "", SMALL_RUN_GOES_ON="1")
    wait_for(tmp_path, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode in ((code, 130, 1) if number == signal.SIGINT else (code,)), out + err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert saved(tmp_path)[-1] == max(losses(tmp_path)) < STEPS


def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path: Path) -> None:
    process = started(tmp_path, "data=2")
    wait_for(tmp_path, 5, process)
    (run_dir,) = (tmp_path / "tmp").glob("tutti-*")
    pid = read_script(run_dir, 1)
    assert pid is not None
    for _ in range(3):
        os.kill(pid, signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, out + err
    assert max(losses(tmp_path)) == max(losses(tmp_path, 1)) == saved(tmp_path)[-1] < STEPS


# In this process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    """A run in this process, where SIGINT raises: whoever starts the tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = SmallRun(tmp_path / "run", every=100)
    with captured_once("small run"):
        yield made
    made.checkpoints.close()
    signal.signal(signal.SIGINT, before)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in stop_signals.SIGNALS]


def test_signals_are_taken_at_the_first_tick_and_given_back(run: SmallRun) -> None:
    before = handlers()
    run.one()
    assert not {*map(id, before)} & {*map(id, handlers())}
    run.checkpoints.close()
    assert handlers() == before


@pytest.mark.parametrize("number", stop_signals.SIGNALS)
def test_a_signal_is_one_save_and_true(run: SmallRun, number: int) -> None:
    before = handlers()
    run.one()
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert not run.checkpoints.stopping
    assert run.one()[1] and run.checkpoints.stopping and run.checkpoints.steps() == [2]
    assert handlers() == before
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        run.one()
    assert getattr(caught.value, "code", 143) == 143 and run.checkpoints.steps() == [2]


def test_signals_during_a_save_do_not_harm_it(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "AGAIN_SECONDS", 0.0)
    run.one()
    os.kill(os.getpid(), signal.SIGINT)
    sent = 0

    def disturb(*_event: object) -> None:
        # At each call of a function of this thread: another thread could send one after the save has ended.
        nonlocal sent
        if run.checkpoints._signals.saving:
            sent += 1
            os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(disturb)
    try:
        assert run.one()[1]
    finally:
        sys.setprofile(None)
    assert sent > 10
    assert run.checkpoints.steps() == [2]


def test_a_late_second_ctrl_c_ends_at_once(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "AGAIN_SECONDS", 0.0)
    run.one()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    run.checkpoints.close()


def test_an_ignored_signal_stays_ignored(run: SmallRun) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run.one()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGINT)
        assert not run.one()[1]
        run.checkpoints.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_takes_no_signals(run: SmallRun) -> None:
    before = handlers()
    thread = threading.Thread(target=run.one)
    thread.start()
    thread.join()
    assert run.step.num_steps == 1 and handlers() == before


def test_a_forked_child_ends_at_sigterm_and_ignores_ctrl_c(run: SmallRun) -> None:
    run.one()
    pid = os.fork()
    if not pid:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_time_is_a_rhythm_too(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", every="0.2 s", keep=None)
    with run.checkpoints:
        run.until(2)
        assert len(run.checkpoints.steps()) <= 1
        time.sleep(0.25)
        run.one()
        assert run.checkpoints.steps()[-1] == 3


def test_ctrl_c_in_a_terminal_leaves_the_workers_of_a_loader(tmp_path: Path) -> None:
    """It reaches all processes of the run at once."""
    words = [SCRIPT.with_name("with_workers.py"), tmp_path / "run"]
    # Tensors of workers pass through sockets in TMPDIR, whose names may not be long.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = Forked(words, env=env, cwd=Path.cwd(), own_session=True)
    try:
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=RUN_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (0, "ended True\n")
