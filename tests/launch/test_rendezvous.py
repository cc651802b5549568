"""Where ranks meet: in a file of their run's own directory, else where torchrun says."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tutti.environment import RUN_DIR
from tutti.errors import CommError, TuttiError
from tutti.launch.not_met import not_met
from tutti.launch.ranks import _meet, _rendezvous


def of_torchrun(monkeypatch: pytest.MonkeyPatch, restart: int = 0, hosts: int = 1) -> None:
    """The variables of a rank of torchrun whose agent keeps the store."""
    store = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    attempt = {"TORCHELASTIC_RESTART_COUNT": str(restart), "GROUP_WORLD_SIZE": str(hosts)}
    for name, value in (store | attempt).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(RUN_DIR.name, raising=False)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("given", [None, ""])
def test_under_torchrun_no_file_is_left(
    given: str | None, agent: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working directory would hold the addresses of the run before."""
    monkeypatch.chdir(tmp_path)
    of_torchrun(monkeypatch)
    monkeypatch.delenv(RUN_DIR.name, raising=False)
    if given is not None:
        monkeypatch.setenv(RUN_DIR.name, given)
    _rendezvous(0, 0, 2).set("a", "b")
    assert agent.check(["tutti/0/a"])
    assert list(tmp_path.iterdir()) == []


def test_ranks_after_a_restart_find_no_address_of_those_before(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several hosts the agents count restarts differently, and ranks must meet."""
    found = []
    for restart, hosts in ((0, 1), (1, 1), (0, 2), (1, 2)):
        of_torchrun(monkeypatch, restart, hosts)
        store = _rendezvous(0, 0, 2)
        found.append(store.check(["address"]))
        store.set("address", "of a rank")
    assert found == [False, False, False, True]


@pytest.mark.parametrize("under", ["tutti run", "torchrun"])
def test_a_rank_that_does_not_come_is_named(
    under: str, agent: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun(monkeypatch)
    if under == "tutti run":
        monkeypatch.setenv(RUN_DIR.name, str(tmp_path))
    monkeypatch.setenv("TUTTI_TIMEOUT", "1")
    with pytest.raises(CommError, match=r"^ranks 0, 2 did not come to rank 1 at the start .* 1 s"):
        _meet(0, 1, 3)
    assert not dist.is_initialized()


def foreign_store(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Another program holds the port of the store: it accepts connections, and never answers."""
    of_torchrun(monkeypatch)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setenv("TUTTI_TIMEOUT", "1")
    other = socket.create_server(("", 0))
    monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
    return other


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    expected = r"^rank 1 got no answer from the store of the run at 127.0.0.1:\d+ within 1 s\n"
    with (
        foreign_store(monkeypatch),
        pytest.raises(CommError, match=f"(?s){expected}.* another MASTER_PORT on all ranks$"),
    ):
        _meet(0, 1, 2)
    assert time.monotonic() - begin < 20


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"^rank 0 cannot open the store of the run at 127.0.0.1:\d+\n"
    with (
        foreign_store(monkeypatch),
        pytest.raises(CommError, match=f"(?s){expected}.*  fix  another MASTER_PORT, the same"),
    ):
        _meet(0, 0, 2)


def test_a_limit_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    for said in ("Resource temporarily unavailable", "can't start new thread"):
        error = str(not_met(RuntimeError(said), 1, [0]))
        assert error.startswith(
            "rank 1 cannot start a thread to meet the other ranks\n  why  " + said
        )
        assert "  fix  raise `ulimit -u` (now 12)" in error


def test_a_rank_that_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    (tmp_path / "rank3.script").write_text(str(gone.pid))
    (tmp_path / "rank5.script").write_text(str(os.getpid()))
    expected = "^rank 0 is gone; it left rank 1 in init_process_group\n  why  remote process exited"
    with pytest.raises(CommError, match=expected):
        _meet(1, 1, 3)


@pytest.mark.parametrize(
    ("name", "up", "expected"),
    [
        ("lo", False, r": the loopback interface lo is down\n  why .*\n  fix  ip link set lo up$"),
        ("eth9", True, r": there is no network interface eth9\n  why .*\n  fix .* with one of lo$"),
    ],
)
def test_an_interface_without_an_address_is_named_at_once(
    name: str, up: bool, expected: str, tmp_path: Path
) -> None:
    """In a network of its own, as a container has one."""
    script = tmp_path / "meet.py"
    script.write_text("from tutti.launch.ranks import _meet\n_meet(0, 0, 1)\n")
    begin = "ip link set lo up && " if up else ""
    words = ["unshare", "-rn", "sh", "-c", f'{begin}exec "$@"', "sh", sys.executable, str(script)]
    if shutil.which("ip") is None or subprocess.run(["unshare", "-rn", "true"]).returncode:
        pytest.skip("cannot make a network namespace here")
    environment = {**os.environ, RUN_DIR.name: str(tmp_path), "GLOO_SOCKET_IFNAME": name}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    said = ended.stderr[ended.stderr.index("CommError: rank 0 cannot meet") :].rstrip()
    assert re.search(expected, said), said


def test_under_tutti_run_it_is_in_the_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path))
    _rendezvous(0, 0, 2).set("a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["ranks.store"]


@pytest.mark.parametrize("name", ["gone", "file", "closed"])
def test_a_directory_that_cannot_be_used_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `FileStore` there would wait for a file that nobody can write."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setattr("os.access", lambda path, _: not str(path).endswith("closed"))
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path / name))
    with pytest.raises(TuttiError, match=f"TUTTI_RUN_DIR=.*{name} is no directory .* to write in"):
        _rendezvous(0, 0, 2)
