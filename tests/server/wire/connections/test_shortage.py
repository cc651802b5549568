"""A server or worker that lacks something says what, and takes it for nobody else's fault."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from server.protocol.updaters import BLOCK_NBYTES, LR, Sgd, gradient, whole_state
from server.wire.running import SECRET, all_at_once, client, like, services
from tutti.errors import CommError, ServerError
from tutti.server.protocol.consistency import parse
from tutti.server.wire import service
from tutti.server.wire.client import Client
from tutti.server.wire.connections import links
from tutti.server.wire.connections.shortage import ShortError, num_descriptors
from tutti.server.wire.service import Service

NO_SPACE = "the records of this server cannot be kept: no space is left on the disk"


class Disk:
    """What is written below a directory, until it is full: then the half of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self.full, self._write = directory, "", os.write
        self._fallocate = os.posix_fallocate
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "posix_fallocate", self.fallocate)

    def _has_room(self, fd: int) -> bool:
        name = os.readlink(f"/proc/self/fd/{fd}")
        return not (self.full and name.startswith(str(self._directory / self.full)))

    def write(self, fd: int, data: Any) -> int:
        if self._has_room(fd):
            return self._write(fd, data)
        self._write(fd, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        if not self._has_room(fd):
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fallocate(fd, offset, nbytes)


@contextmanager
def serving(sync: str = "async", num_workers: int = 1, **options: Any) -> Iterator[Service]:
    """A server whose `run` ends with a `ShortError`."""
    options = {"secret": SECRET, "block_nbytes": BLOCK_NBYTES} | options
    updater = Sgd()
    one = Service(
        updater,
        whole_state(updater),
        consistency=parse(sync),
        num_workers=num_workers,
        **options,
    )
    ended: list[BaseException] = []

    def run() -> None:
        try:
            one.run()
        except ShortError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield one
    thread.join(60)
    assert not thread.is_alive() and len(ended) == 1, "the server went on"
    assert NO_SPACE in str(ended[0])


def push(one: Client) -> None:
    seen = like(Sgd())
    one.pull(seen)
    assert one.push(gradient(seen, one.session.worker, one.clock), {"lr": LR}).taken


@pytest.mark.parametrize("what", ["journal", "segment", "snapshot"])
def test_a_full_disk_ends_the_server_and_loses_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are told in a `ServerError`; with room again the server has every push that it answered."""
    disk, directory = Disk(tmp_path / "records", monkeypatch), tmp_path / "records"
    monkeypatch.setattr(service, "_TELLING_SECONDS", (0.1, 20.0))
    options = {"directory": directory, "log_nbytes": 2**13}
    with serving(**options) as running, client(Sgd(), "async", [running.address], 0) as one:
        one.join()
        push(one)
        disk.full = what
        with pytest.raises(ServerError, match=f"server 0 refuses this worker: {NO_SPACE}"):
            for _ in range(100):
                push(one)
        before, sequence = one.clock, one.session.sequence
    disk.full = ""
    updater = Sgd()
    with (
        services(updater, "async", 1, **options) as running,
        client(updater, "async", [running[0].address], 0) as one,
    ):
        ledger = running[0].machine.ledger
        assert ledger.version == before == sequence - 1
        one.join()
        push(one)


def test_who_waits_and_who_computes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "records", monkeypatch)
    joined = threading.Barrier(3, timeout=30)  # a full disk refuses who joins

    def waits(at: list[str]) -> None:
        with client(Sgd(), "step", at, 1) as one:
            one.join()
            joined.wait()
            push(one)
            with pytest.raises(ServerError, match=NO_SPACE):
                one.pull(like(Sgd()))

    def computes(at: list[str]) -> None:
        with client(Sgd(), "step", at, 2) as one:
            one.join()
            joined.wait()
            until = time.monotonic() + 30
            while one._links._failure is None and time.monotonic() < until:
                time.sleep(0.05)  # its beats ask for it
            with pytest.raises(ServerError, match=NO_SPACE):
                push(one)

    def pushes(at: list[str]) -> None:
        with client(Sgd(), "step", at, 0) as one:
            one.join()
            joined.wait()
            seen = like(Sgd())
            one.pull(seen)
            until = time.monotonic() + 30
            while len(running.machine._waiting) < 1 and time.monotonic() < until:
                time.sleep(0.02)
            disk.full = "journal"
            with pytest.raises(ServerError, match=NO_SPACE):
                one.push(gradient(seen, 0, 0), {"lr": LR})
            one.leave()  # as at the end of a process: it has been told already

    with serving("step", 3, directory=tmp_path / "records") as running:
        at = [running.address]
        all_at_once(*(functools.partial(f, at) for f in (pushes, waits, computes)))


def test_a_server_does_not_begin_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "records", monkeypatch)
    disk.full = "snapshot"
    with (
        pytest.raises(ServerError, match="no space is left on the disk"),
        services(Sgd(), "async", 1, directory=tmp_path / "records"),
    ):
        pass
    disk.full = ""
    with services(Sgd(), "async", 1, directory=tmp_path / "records"):
        pass


def _few_descriptors(pipe: Connection, extra: int) -> None:
    """A server that can open `extra` descriptors more."""
    updater = Sgd()
    one = Service(
        updater,
        whole_state(updater),
        consistency=parse("async"),
        num_workers=1,
        secret=SECRET,
        block_nbytes=BLOCK_NBYTES,
        lease_seconds=60.0,
    )
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 20, hard))
    fill = []
    with contextlib.suppress(OSError):
        while True:
            fill.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(extra):
        os.close(fill.pop())
    pipe.send(one.address)
    while pipe.recv() == "turns":
        pipe.send(_turns(one, 1.0))
    one.stop()
    thread.join(20)


def _turns(one: Service, seconds: float) -> int:
    """How often a server looks at the network in so many seconds."""
    found, turn = [], one._turn

    def counted() -> None:
        found.append(0)
        turn()

    one._turn = counted  # type: ignore[method-assign]
    time.sleep(seconds)
    one._turn = turn  # type: ignore[method-assign]
    return len(found)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Connection]]:
    """A server with descriptors for the two connections of one worker."""
    monkeypatch.setenv("TUTTI_SHARED_MEMORY", "off")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_few_descriptors, args=(there, 2), daemon=True)
    process.start()
    yield here.recv(), here
    here.send("stop")
    process.join(30)
    assert process.exitcode == 0


def test_a_server_without_descriptors_says_so_and_recovers(
    crowded: tuple[str, Connection],
) -> None:
    at, pipe = [crowded[0]], crowded[1]
    with client(Sgd(), "async", at, 0) as one:
        one.join()
        push(one)
        beats = one._beats._links._links[0]
        _wait(lambda: beats.connection is not None and beats.connection.opened)  # the second one
        _wait(lambda: _refuses(at))
        pipe.send("turns")
        assert pipe.recv() < 200  # it waits; it does not spin
        push(one)
        one.leave()
    _wait(lambda: not _refuses(at))


def _refuses(at: list[str]) -> bool:
    """Whether another worker is refused so; nothing else may go wrong."""
    with client(Sgd(), "async", at, 0) as other:
        try:
            other.status()
        except ServerError as error:
            assert "file descriptors of the process are in use" in str(error)
            return True
        return False


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 40
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_more_connections_than_a_server_takes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with services(Sgd(), "async", 3) as running:
        at = [running[0].address]
        with client(Sgd(), "async", at, 0) as one:
            one.join()
            push(one)
            running[0]._door.most = 1
            with (
                client(Sgd(), "async", at, 1) as other,
                pytest.raises(ServerError, match="connections are open, the most that this server"),
            ):
                other.join()
            running[0]._door.most = 10
            with client(Sgd(), "async", at, 1) as other:
                other.join()
                push(other)


def test_a_worker_without_descriptors_blames_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_SHORT_SECONDS", 0.3)
    with (
        services(Sgd(), "async", 1) as running,
        client(Sgd(), "async", [running[0].address], 0) as one,
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        fill: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 8, hard))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    fill.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(ServerError, match="this worker cannot connect to server 0") as told:
                one.join()
        finally:
            for fd in fill:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "file descriptors of the process are in use" in str(told.value)
        one.join()
        push(one)


def test_a_server_that_is_not_there_is_still_waited_for() -> None:
    said = pytest.raises(CommError, match=r"it cannot be reached \(.*refused.*\)")
    with client(Sgd(), "async", ["127.0.0.1:9"], 0, timeout_seconds=0.3) as one, said:
        one.join()


def test_refusals_end_no_lease_and_change_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server without room has in memory is what its records give again."""
    disk = Disk(tmp_path / "records", monkeypatch)
    monkeypatch.setattr(service, "_TELLING_SECONDS", (0.1, 20.0))
    with (
        serving(directory=tmp_path / "records") as running,
        client(Sgd(), "async", [running.address], 0) as one,
    ):
        one.join()
        push(one)
        disk.full = "journal"
        for _ in range(2):
            with pytest.raises(ServerError, match=NO_SPACE):
                push(one)
        kept = running.machine.ledger.state
    disk.full = ""
    with services(Sgd(), "async", 1, directory=tmp_path / "records") as running_again:
        found = running_again[0].machine.ledger.state
        for key, slots in kept.items():
            assert all(torch.equal(found[key][slot], x) for slot, x in slots.items())
