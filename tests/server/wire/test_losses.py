"""Workers that vanish, are suspended, or come back to a run that is over."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from server.protocol.test_simulated import synchronous
from server.protocol.updaters import BLOCK_NBYTES, LR, Sgd, gradient, whole_state
from server.wire.running import SECRET, all_at_once, client, like, services
from tutti.environment import LEASE
from tutti.errors import CommError
from tutti.server.protocol.consistency import parse
from tutti.server.wire.client import Client
from tutti.server.wire.connections.run_over import RunOverError
from tutti.server.wire.service import Service

LEASE_SECONDS = 0.5


def pushed(one: Client, worker: int) -> bool:
    """Pull and push once; whether the push counts."""
    seen = like(Sgd())
    one.pull(seen)
    return one.push(gradient(seen, worker, one.clock), {"lr": LR}).taken


def suspended(one: Client) -> None:
    """As a stopped process: no heartbeat, but connections."""
    one._beats.stop()
    assert one._beats._thread is not None
    one._beats._thread.join()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def ending(num_workers: int) -> Iterator[tuple[Service, list[BaseException]]]:
    """A service under `step` that ends with an error, and that error."""
    service = Service(
        Sgd(),
        whole_state(Sgd()),
        consistency=parse("step"),
        num_workers=num_workers,
        secret=SECRET,
        lease_seconds=LEASE_SECONDS,
        block_nbytes=BLOCK_NBYTES,
    )
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            service.run()
        except RunOverError as error:
            failed.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield service, failed
    thread.join(20)
    assert not thread.is_alive()


def test_step_ends_for_all_when_a_worker_has_vanished() -> None:
    """No update is made without its rows; each of the others, and the server, names it."""
    said = "worker 1 is lost: the connection was closed"
    with ending(3) as (service, failed):
        at = [service.address]
        with (
            client(Sgd(), "step", at, 0) as waits,
            client(Sgd(), "step", at, 1) as vanishes,
            client(Sgd(), "step", at, 2) as computes,
        ):
            all_at_once(waits.join, vanishes.join, computes.join)
            for one, worker in ((waits, 0), (computes, 2)):
                assert pushed(one, worker)
            vanishes.close()
            with pytest.raises(RunOverError, match=said):
                waits.pull(like(Sgd()))
            until(lambda: computes._links.failed)  # a heartbeat has told it
            with pytest.raises(RunOverError, match=said):
                computes.pull(like(Sgd()))
    assert len(failed) == 1 and said in str(failed[0])
    assert service.machine.ledger.version == 0


def test_step_names_the_worker_for_which_the_one_that_left_had_waited() -> None:
    """As behind a link that has broken: no request comes, and its connections are not closed."""
    with ending(2) as (service, failed):
        at = [service.address]
        with client(Sgd(), "step", at, 0) as one, client(Sgd(), "step", at, 1) as other:
            all_at_once(one.join, other.join)
            suspended(other)
            assert pushed(one, 0)
            time.sleep(2 * LEASE_SECONDS)
            one.close()
            until(lambda: service._failure is not None)
            service.stop()  # it would wait longer, to tell worker 1
    said = r"nothing came from worker 1 for \d s, and worker 0 left meanwhile\n"
    assert re.match(said, str(failed[0]))


def test_step_waits_for_a_suspended_worker() -> None:
    with services(Sgd(), "step", 2, lease_seconds=LEASE_SECONDS) as running:
        at = [running[0].address]
        with client(Sgd(), "step", at, 0) as one, client(Sgd(), "step", at, 1) as other:
            all_at_once(one.join, other.join)
            assert pushed(one, 0)
            suspended(other)
            time.sleep(4 * LEASE_SECONDS)
            assert pushed(other, 1)
            seen = like(Sgd())
            one.pull(seen)
    for n, x in synchronous(Sgd(), 2, 1).items():
        torch.testing.assert_close(seen[n], x, rtol=1e-12, atol=1e-12)


def test_one_that_comes_back_to_updates_that_were_made_together_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LEASE.name, str(LEASE_SECONDS))
    with services(Sgd(), "async(after=9)", 2, lease_seconds=LEASE_SECONDS) as running:
        at = [running[0].address]
        with (
            client(Sgd(), "async(after=9)", at, 0) as one,
            client(Sgd(), "async(after=9)", at, 1) as other,
        ):
            all_at_once(one.join, other.join)
            suspended(other)
            assert pushed(one, 0) and pushed(one, 0)
            other._beats.longest_seconds = 7.25
            with pytest.raises(
                CommError, match=r"gone on without worker 1: this worker was suspended.* 7\.2 s"
            ):
                pushed(other, 1)
            assert 1 not in running[0].machine.ledger.active()
            assert running[0].machine.ledger.version == 2


def test_a_worker_hears_at_once_that_its_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEASE.name, "30")
    over = threading.Event()
    with services(Sgd(), "async", 1) as running:
        one = client(Sgd(), "async", [running[0].address], 0, has_ended=lambda _: over.is_set())
        one.join()
        assert pushed(one, 0)
    over.set()
    begin = time.monotonic()
    with pytest.raises(RunOverError, match="server 0 has ended, since no worker was left"):
        pushed(one, 0)
    one.leave()
    assert time.monotonic() - begin < 10
