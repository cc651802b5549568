"""A rank that waits unusually long says once for what, for whom, and where the late rank is."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import Forked
from tutti.launch import records, waits
from tutti.launch.asking import Answer, answer, ask
from tutti.launch.records import Waited, note_script, read_record
from tutti.launch.thread_stacks import stack_of
from tutti.launch.waits import LEAST_SECONDS, LOOK_SECONDS, NUM_USUAL, WaitWatch
from tutti.launch.whereabouts import Waiting

SCRIPT = Path(__file__).parent / "late.py"
SOURCE = SCRIPT.read_text().splitlines()
LATE_AT = 1 + next(i for i, line in enumerate(SOURCE) if "# rank 1 is here" in line)
RUN_SECONDS = 120.0


class Played:
    """A watch whose rank waits when it is told to, by a clock of its own."""

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir, self.now = run_dir, 0.0
        self.found: Waiting | None = None
        self.watch = WaitWatch(0, run_dir, list, size=2, clock=lambda: self.now)

    def wait(self, seconds: float, key: int, ranks: tuple[int, ...] = (1,)) -> str:
        """What is said of a wait of so many seconds."""
        before = self._last()
        self.found = Waiting(key, "all_reduce over data (8 B)", "train.py:12", ranks)
        for _ in range(round(seconds / LOOK_SECONDS) + 1):
            self.watch.look()
            self.now += LOOK_SECONDS
        after = self._last()
        return after.text if after is not None and after != before else ""

    @property
    def directory(self) -> Path:
        assert self.run_dir is not None
        return self.run_dir

    def _last(self) -> Waited | None:
        return read_record(self.run_dir, Waited, 0) if self.run_dir is not None else None


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played(tmp_path)
    monkeypatch.setattr(waits, "wait", lambda *_: made.found)
    return made


def test_a_short_wait_is_nothing_to_speak_of(played: Played) -> None:
    assert played.wait(LEAST_SECONDS - 1, 1) == ""


def test_a_long_wait_is_told_once(played: Played) -> None:
    said = played.wait(3 * LEAST_SECONDS, 1)
    begin = r"rank 0 has waited 1\d s in all_reduce over data \(8 B\) at train\.py:12: "
    assert re.fullmatch(
        rf"{begin}rank 1 is not here yet\n  rank 1: it has not started its script yet", said
    ), said
    found = read_record(played.directory, Waited, 0)
    assert found is not None and (found.number, found.late) == (1, [1])
    assert played.wait(3 * LEAST_SECONDS, 2)  # another wait
    found = read_record(played.directory, Waited, 0)
    assert found is not None and found.number == 2


def test_what_is_usual_for_a_rank_is_not_told(played: Played) -> None:
    for k in range(NUM_USUAL):
        assert played.wait(4.0, k) == ""
    assert played.wait(3 * LEAST_SECONDS, 1000) == ""
    assert played.wait(60.0, 1001).startswith("rank 0 has waited 4")


def test_time_for_which_this_process_was_stopped_does_not_count(played: Played) -> None:
    assert played.wait(2.0, 1) == ""
    played.now += 3600.0
    assert played.wait(2.0, 1) == ""


def test_a_wait_that_is_over_while_others_are_asked_is_not_told(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(*_: object) -> Answer:
        played.found = None
        return Answer()

    monkeypatch.setattr(waits, "ask", answers)
    assert played.wait(2 * LEAST_SECONDS, 1) == ""


def test_of_a_group_only_those_are_late_that_are_elsewhere(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Answer("train.py:12", "all_reduce over data (8 B)")
    elsewhere = Answer("data.py:3", "", ("train.py:9 in main", "data.py:3 in read"))
    monkeypatch.setattr(waits, "ask", lambda _, rank: {1: there, 2: elsewhere}[rank])
    said = played.wait(2 * LEAST_SECONDS, 1, (1, 2)).splitlines()
    assert said[0].endswith(": rank 2 is not here yet")
    assert said[1:] == [
        "  rank 2 is at data.py:3:",
        "    train.py:9 in main",
        "    data.py:3 in read",
    ]


def test_without_a_launcher_a_rank_says_it_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Played(None)
    monkeypatch.setattr(waits, "wait", lambda *_: made.found)
    made.wait(3 * LEAST_SECONDS, 1)
    said = capsys.readouterr().err
    assert said.startswith("rank 0 has waited 1") and said.endswith(": rank 1 is not here yet\n")


def test_a_rank_that_is_asked_answers_with_its_stack(tmp_path: Path) -> None:
    note_script(tmp_path, 1)  # this process
    done = threading.Event()
    ident = threading.get_ident()

    def keep_answering() -> None:
        while not done.wait(0.01):
            answer(tmp_path, 1, stack_of(ident))

    thread = threading.Thread(target=keep_answering)
    thread.start()
    answers: list[Answer] = []
    others = [threading.Thread(target=lambda: answers.append(ask(tmp_path, 1, 10.0))) for _ in "12"]
    try:
        for other in others:  # several may ask at once
            other.start()
        said = ask(tmp_path, 1, 10.0)
        for other in others:
            other.join()
    finally:
        done.set()
        thread.join()
    assert len(answers) == 2 and not any(one.why for one in answers)
    assert not said.why and said.line.partition(":")[0].endswith("test_waits.py")
    assert any("in test_a_rank_that_is_asked_answers" in line for line in said.stack)
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.script"]


def test_a_rank_that_does_not_answer_is_told_with_its_state(tmp_path: Path) -> None:
    note_script(tmp_path, 1)
    assert "native code holds its Python" in ask(tmp_path, 1, 0.2).why
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.script"]
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "rank1.script").write_text(str(pid))
    assert ask(tmp_path, 1).why == f"process {pid} has ended"
    os.waitpid(pid, 0)
    assert records.read_script(tmp_path, 2) is None
    assert Answer(why="not asked").said(3) == "  rank 3: not asked"


def told(process: Forked) -> list[str]:
    """The lines on stderr up to where the late rank is."""
    killer = threading.Timer(RUN_SECONDS, process.kill)
    killer.start()
    lines = []
    try:
        assert process.stderr is not None
        for line in iter(process.stderr.readline, ""):
            lines.append(line.rstrip())
            if line.startswith("  rank 1"):
                return lines
    finally:
        killer.cancel()
    raise AssertionError("\n".join(lines))


def begun(how: str, layout: str, memory: str, directory: Path) -> Forked:
    words = ["-m", "tutti", "run", "--layout", layout, str(SCRIPT), how, str(directory)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUTTI_SHARED_MEMORY": memory}
    return Forked(words, env=env, cwd=Path.cwd())


DEAF = ("8", "data=2", "/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def early(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Forked]]:
    """The run that waits longest, which begins before the others."""
    directory = tmp_path_factory.mktemp("deaf")
    process = begun(*DEAF, directory)
    yield directory, process
    process.kill()


@pytest.mark.parametrize(
    ("how", "layout", "memory"),
    [
        ("sleep", "data=2", "/dev/shm"),
        ("sleep", "data=2", "off"),
        ("sleep", "pipe=2 micro=2", "/dev/shm"),
        ("stop", "data=2", "/dev/shm"),
        DEAF,
    ],
    ids=["shared memory", "Gloo", "pipeline", "stopped", "deaf"],
)
def test_a_run_says_where_the_late_rank_is(
    how: str, layout: str, memory: str, tmp_path: Path, early: tuple[Path, Forked]
) -> None:
    is_deaf = (how, layout, memory) == DEAF
    directory, process = early if is_deaf else (tmp_path, begun(how, layout, memory, tmp_path))
    try:
        *_, first, where = told(process)
        assert re.fullmatch(
            r"rank 0 has waited \d+ s in \w+ over .+ \(.+B\) at \S*late\.py:\d+: "
            r"rank 1 is not here yet",
            first,
        ), first
        if how == "stop":
            pid = int((directory / "pid").read_text())
            assert where == f"  rank 1: process {pid} is stopped"
            os.kill(pid, signal.SIGCONT)
        (directory / "go").touch()
        out, err = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.splitlines() == ["rank 0 done"]
    assert "not here yet" not in err
    if how == "sleep":
        assert re.fullmatch(rf"  rank 1 is at \S*late\.py:{LATE_AT}:", where), where
        names = [line.rpartition(" in ")[2] for line in err.splitlines() if line[:4] == "    "]
        assert names[-3:] == ["main", "come_late", "reads_a_batch"], err
    if how == "8":
        assert re.fullmatch(
            r"  rank 1: process \d+ waits in the kernel and does not answer: "
            r"native code holds its Python",
            where,
        ), where
