"""Runs with servers, as `tutti run` starts them: the same numbers, and who may die."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import served_script
import tutti
from served_runs import (
    SCRIPT,
    WAIT_SECONDS,
    Run,
    kill,
    lines,
    of_no_run,
    on_one_device,
    played,
    wait_for,
    wait_for_end,
)
from tutti.environment import LINGER, LISTEN, ROLE, SECRET, SERVERS
from tutti.launch import supervise
from tutti.launch.roles import SERVER, Role, roles_of
from tutti.launch.supervise import Supervisor
from tutti.layout import Layout
from tutti.serving.left_workers import LeftWorkers
from tutti.serving.server_side import _stop_when_left


def test_step_is_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two servers, and with two ranks a worker."""
    code, said = played(tmp_path, "replica=2 tensor=2 server=2 sync=step")
    assert code == 0, said
    alone = on_one_device(tmp_path, 4, monkeypatch)
    expected = lines(alone, "one", "step")
    for who in ("worker0", "worker1", "worker0.1", "worker1.1"):
        found = lines(tmp_path, who, "step")
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-12)
        assert lines(tmp_path, who, "eval")[0] == pytest.approx(
            lines(alone, "one", "eval")[0], abs=1e-12
        )
    assert not (tmp_path / "server0.pt").exists()  # its script ends at the first step
    mine = torch.load(tmp_path / "worker1.1.pt", weights_only=True)
    theirs = torch.load(alone / "one.pt", weights_only=True)
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(mine[name], x, rtol=0, atol=1e-12, msg=name)
    # The checkpoint goes on under any layout.
    model, optimizer = served_script.make()
    step = tutti.distribute(served_script.train_step, model, optimizer, "")
    step.load(tmp_path / "checkpoint")
    assert step.num_steps == 4
    torch.testing.assert_close(step.state_dict(), theirs, rtol=0, atol=1e-12)


def test_workers_are_together_at_first_and_then_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = played(tmp_path, "replica=2 server=1 sync=async(after=2, predict)")
    assert code == 0, said
    alone = on_one_device(tmp_path, 2, monkeypatch)
    expected = torch.tensor(lines(alone, "one", "step"))
    found = [torch.tensor(lines(tmp_path, f"worker{w}", "step")) for w in range(2)]
    for own in found:
        torch.testing.assert_close(own[:2], expected, rtol=0, atol=1e-12)
    assert len(found[0]) == len(found[1]) == 4
    assert (found[0][2:, 1] != found[1][2:, 1]).all()  # of rows of their own
    saved = [torch.load(tmp_path / f"worker{w}.pt", weights_only=True) for w in range(2)]
    counts = [state["optim.0.weight.step"].item() for state in saved]
    # Whoever saves first has its own updates at least; whoever saves last has all of both.
    assert min(counts) >= 2 + 2 and max(counts) == 2 + 2 * 2


def test_a_killed_server_goes_on_and_a_killed_worker_has_left(tmp_path: Path) -> None:
    def play(directory: Path) -> None:
        for who, steps in (("server0", 3), ("worker1", 6)):
            wait_for(directory, "worker1", steps)
            wait_for(directory, "worker0", steps)
            kill(directory, who)
        wait_for_end(directory, "worker1")
        (directory / "go").touch()

    # Neither may be done before the other is far enough, however slow that one is.
    wrong = "worker0:6,worker1:8"
    code, said = played(tmp_path, "replica=2 server=1 sync=async", play, steps=12, wrong=wrong)
    assert code == 0, said
    assert len(lines(tmp_path, "server0", "pid")) == 2
    assert len(lines(tmp_path, "worker0", "step")) == 12
    left = len(lines(tmp_path, "worker1", "step"))
    assert 6 <= left <= 8
    count = torch.load(tmp_path / "worker0.pt", weights_only=True)["optim.0.weight.step"].item()
    # One push may count whose worker did not live to hear it.
    assert 12 + left <= count <= 12 + left + 1


@pytest.mark.parametrize("layout", ["replica=2 server=1", "replica=2 data=2 server=2"])
@pytest.mark.parametrize(("sync", "how"), [("async", "killed"), ("bounded(2)", "ended")])
def test_the_first_remaining_worker_saves(
    tmp_path: Path, layout: str, sync: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a save that comes before the lease of the killed one is over."""
    of_no_run(monkeypatch)

    def play(directory: Path) -> None:
        wait_for(directory, "worker0", 3)
        wait_for(directory, "worker1", 3)
        if how == "killed":
            kill(directory, "worker0")
        wait_for_end(directory, "worker0")
        (directory / "go").touch()

    mark = ":" if how == "killed" else "-"
    wrong = f"worker0{mark}3,worker0.1{mark}3,worker1:5,worker1.1:5"
    code, said = played(tmp_path, f"{layout} sync={sync}", play, steps=6, wrong=wrong)
    assert code == 0, said
    model, optimizer = served_script.make()
    step = tutti.distribute(served_script.train_step, model, optimizer, "")
    step.load(tmp_path / "checkpoint")
    assert step.num_steps == 6
    torch.testing.assert_close(
        step.state_dict(), torch.load(tmp_path / "worker1.pt", weights_only=True), rtol=0, atol=0
    )


def test_a_worker_dies_with_any_of_its_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def play(directory: Path) -> None:
        wait_for(directory, "worker1.1", 3)
        kill(directory, "worker1.1")
        wait_for_end(directory, "worker1")
        (directory / "go").touch()

    layout, wrong = "replica=2 data=2 server=1 sync=async", "worker0:3,worker0.1:3,worker1.1:5"
    code, said = played(tmp_path, layout, play, steps=10, wrong=wrong)
    assert code == 0, said
    said = capfd.readouterr().err
    assert "worker 1.1 died (signal 9)" in said and "; the others go on\n" in said
    assert "CommError" not in said and ": the others went on without worker 1.1\n" in said
    for who, least, most in (("worker0", 10, 10), ("worker0.1", 10, 10), ("worker1", 3, 5)):
        assert least <= len(lines(tmp_path, who, "step")) <= most
        assert bool(lines(tmp_path, who, "eval")) == (who != "worker1")
    counted = torch.load(tmp_path / "worker0.1.pt", weights_only=True)["optim.0.weight.step"].item()
    left = len(lines(tmp_path, "worker1", "step"))
    assert 10 + left <= counted <= 10 + left + 1


def test_names_of_processes() -> None:
    layout = Layout.parse("replica=2 data=3 server=2 sync=step")
    roles = roles_of(layout)
    assert [role.rank(layout) for role in roles] == list(range(8))
    assert [str(role) for role in roles[2:5]] == ["worker 0.2", "worker 1", "worker 1.1"]
    assert [Role.parse(str(role)) for role in roles] == roles


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [("replica=2 server=1 sync=step", "worker1"), ("replica=2 server=1 sync=async", "server0")],
)
def test_what_cannot_go_on_is_stopped(
    layout: str, wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = played(tmp_path, layout, wrong=wrong)
    assert code == 1
    said = capfd.readouterr().err
    assert "ValueError: something is wrong here" in said and "logs in" in said


def test_no_step_is_made_without_a_worker_whose_script_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = played(tmp_path, "replica=2 server=1 sync=step", wrong="worker1!2")
    assert code == 1 and "ValueError: a bad record" in capfd.readouterr().err
    assert len(lines(tmp_path, "worker0", "step")) == 2


def test_a_worker_whose_script_fails_is_in_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others go on to their end all the same."""
    code, _ = played(tmp_path, "replica=2 server=1 sync=async", wrong="worker1")
    assert code == 1 and len(lines(tmp_path, "worker0", "step")) == 4
    said = capfd.readouterr().err
    assert "worker 1 failed: ValueError: something is wrong here; the others go on\n" in said
    assert said.index("the others go on") < said.index("rank 1 failed: ValueError")


def test_a_worker_that_ends_before_the_others_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two servers note it. Without it nothing is said of workers that end together."""
    said = []
    for name, wrong in (("early", "worker1-2"), ("together", "worker0-2,worker1-2")):
        (tmp_path / name).mkdir()
        code, _ = played(tmp_path / name, "replica=2 server=2 sync=step", wrong=wrong)
        assert code == 0 and len(lines(tmp_path / name, "worker1", "step")) == 2
        said.append(capfd.readouterr().err)
    early, together = said
    assert early.count("worker 1 has left: the others go on without its rows of each batch") == 1
    assert "has left" not in together


class Brief:
    """A process that has ended when it has been asked so often."""

    def __init__(self, asked: int, code: int) -> None:
        self.left, self.returncode = asked, code

    def poll(self) -> int | None:
        self.left -= 1
        return None if self.left > 0 else self.returncode

    def send_signal(self, sig: int) -> None: ...


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_others_go_on_only_where_there_are_others(
    elsewhere: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.001)

    class Played(Supervisor):
        def spawn(self, environment: dict[str, str], log: Path | None) -> Any:
            return {"worker 0": Brief(2, 1), "worker 1": Brief(20, 3), "server 0": Brief(60, 0)}[
                environment[ROLE.name]
            ]

    layout = Layout.parse(f"replica={3 if elsewhere else 2} server=1 sync=async")
    here = [r for r in roles_of(layout) if str(r) != "worker 2"]
    assert Played(layout, here, ["train.py"], log_dir=tmp_path).run() == 1
    said = capfd.readouterr().err
    by = ", without Python's exit, as by os._exit"
    assert f"worker 0 ended (exit code 1{by}); the others go on\n" in said
    assert f"worker 1 ended (exit code 3{by}){'; the others go on' * elsewhere}\n" in said


def test_servers_that_nobody_can_come_to_are_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers fail before they have joined: the servers would wait for them for ever."""
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.001)
    told: list[int] = []

    class Waiting(Brief):
        def send_signal(self, sig: int) -> None:
            told.append(sig)
            self.left, self.returncode = 0, -sig

    class Played(Supervisor):
        def spawn(self, environment: dict[str, str], log: Path | None) -> Any:
            server = environment[ROLE.name].startswith("server")
            return Waiting(10**9, 0) if server else Brief(3, 1)

    layout = Layout.parse("replica=2 server=1 sync=async")
    assert Played(layout, roles_of(layout), ["train.py"], log_dir=tmp_path).run() == 1
    assert told == [signal.SIGTERM]
    assert "worker 0 ended (exit code 1" in capfd.readouterr().err


def test_a_server_ends_without_a_worker_that_never_came() -> None:
    """Worker 0 has come and gone; worker 1 was waited for, for as long as workers are."""

    class Served:
        def __init__(self) -> None:
            self.stopped = Event()
            self.stop, self.lapsed = self.stopped.set, dict
            self.machine = SimpleNamespace(
                ledger=SimpleNamespace(started=False, active=dict, missed=list)
            )

    service: Any = Served()
    told = LeftWorkers(Role(SERVER, 0), Layout.parse("replica=2 server=1 sync=async"))
    Thread(target=_stop_when_left, args=(service, told), daemon=True).start()
    assert not service.stopped.wait(LINGER.default + 1.0)
    service.machine.ledger.started = True
    assert service.stopped.wait(30.0)


def test_servers_and_workers_that_are_started_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two hosts: they share an address and a secret."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv(SECRET.name, "0123456789abcdef0123456789abcdef")
    layout = Layout.parse("replica=2 server=1 sync=bounded(1, ahead, traffic=bf16)")
    *workers, server = roles_of(layout)
    codes: dict[str, int] = {}

    def start(name: str, roles: list[Role], **given: str) -> Thread:
        words = [str(SCRIPT), str(tmp_path), "3", "nobody"]
        environment = {"TUTTI_TIMEOUT": "60", "OMP_NUM_THREADS": "1", **given}
        made = Run(layout, roles, words, environment=environment, log_dir=tmp_path / name)
        thread = Thread(target=lambda: codes.update({name: made.run()}))
        thread.start()
        return thread

    threads = [
        start("servers", [server], **{LISTEN.name: address, LINGER.name: "0.5"}),
        start("first", workers[:1], **{SERVERS.name: address}),
        start("second", workers[1:], **{SERVERS.name: address}),
    ]
    for thread in threads:
        thread.join(WAIT_SECONDS)
    said = "".join(p.read_text() for p in tmp_path.glob("*/*.log"))
    assert codes == {"servers": 0, "first": 0, "second": 0}, said
    assert all(len(lines(tmp_path, f"worker{w}", "step")) == 3 for w in range(2))
    count = torch.load(tmp_path / "worker1.pt", weights_only=True)["optim.0.weight.step"].item()
    assert 3 <= count <= 6
