"""Servers and workers over real sockets."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch

from server.protocol.test_simulated import synchronous
from server.protocol.updaters import (
    LR,
    UPDATERS,
    ClippedAdam,
    Sgd,
    gradient,
    weights_of,
    whole_state,
)
from server.wire.running import all_at_once, client, like, services, train
from tutti.errors import CommError, ServerError
from tutti.server.protocol.update import WEIGHT
from tutti.server.wire.client import Rows


def weights(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {n: slots[WEIGHT] for n, slots in state.items()}


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("name", sorted(UPDATERS))
@pytest.mark.parametrize("sync", ["step", "bounded(0)"])
def test_step_is_one_device(sync: str, name: str, num_servers: int) -> None:
    updater = UPDATERS[name]()
    with services(updater, sync, 3, num_servers) as running:
        at = [s.address for s in running]
        all_at_once(*(functools.partial(train, updater, sync, at, w, 4) for w in range(3)))
        with client(updater, sync, at, -1) as observer:
            found = weights(observer.pull_state())
    for n, x in synchronous(updater, 3, 4).items():
        torch.testing.assert_close(found[n], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sync", ["async", "async(damped)", "bounded(2)"])
def test_every_push_is_an_update(sync: str) -> None:
    updater = ClippedAdam()
    with services(updater, sync, 3, 2) as running:
        at = [s.address for s in running]
        all_at_once(*(functools.partial(train, updater, sync, at, w, 5) for w in range(3)))
        with client(updater, sync, at, -1) as observer:
            for figures in observer.status():
                assert figures.version == 15 and sum(figures.staleness.values()) == 15
                assert figures.workers == ()
            steps = {float(slots["step"]) for slots in observer.pull_state().values()}
            assert steps == {15.0}


@pytest.mark.parametrize("sync", ["step", "async", "async(after=4, predict)"])
def test_a_server_that_starts_again_has_lost_nothing(sync: str, tmp_path: Path) -> None:
    """Each server stops after a few pushes and another goes on at the same place; workers notice nothing."""
    updater = ClippedAdam()
    options = {"directory": tmp_path, "log_nbytes": 2**12}
    with services(updater, sync, 1, **options) as running:
        at = [running[0].address]
        one = client(updater, sync, at, 0)
        one.join()
        _steps(one, updater, 3)
        before, ledger = one.pull_state(), running[0].machine.ledger
    for _ in range(3):
        with services(updater, sync, 1, **options, address=at[0]) as running:
            after, now = one.pull_state(), running[0].machine.ledger
            assert (now.version, now.lag) == (ledger.version, ledger.lag)
            assert all(
                torch.equal(x, now.state[key][slot])  # what is kept for predictions too
                for key, slots in ledger.state.items()
                for slot, x in slots.items()
            )
            for name, slots in before.items():
                assert all(torch.equal(after[name][slot], x) for slot, x in slots.items())
            _steps(one, updater, 2)
            before, ledger, seen = one.pull_state(), now, like(updater)
            one.look(seen)
            assert all(torch.equal(x, before[n][WEIGHT]) for n, x in seen.items())
    with services(updater, sync, 1, **options, address=at[0]):
        assert one.clock == 9
        one.leave()
    if sync == "step":
        for n, x in synchronous(updater, 1, 9).items():
            torch.testing.assert_close(before[n][WEIGHT], x, rtol=1e-12, atol=1e-12)


def _steps(one, updater, count: int) -> None:  # type: ignore[no-untyped-def]
    seen = like(updater)
    for _ in range(count):
        one.pull(seen)
        made = gradient(seen, 0, one.clock)
        numbers = {"lr": LR, "clip": 0.5} if one.alone else {"lr": LR}
        assert one.push(made, numbers).taken


def test_the_directory_of_another_server_is_refused(tmp_path: Path) -> None:
    with (
        services(Sgd(), "step", 1, directory=tmp_path),
        pytest.raises(ServerError, match="another server uses"),
        services(Sgd(), "step", 1, directory=tmp_path),
    ):
        pass
    with (
        pytest.raises(ServerError, match="records of another server"),
        services(ClippedAdam(), "step", 1, directory=tmp_path),
    ):
        pass


def test_one_server_serves_sixteen_workers() -> None:
    updater = Sgd()
    with services(updater, "async", 16) as running:
        at = [running[0].address]
        all_at_once(*(functools.partial(train, updater, "async", at, w, 6) for w in range(16)))
        figures = running[0].machine.ledger
        assert figures.version == 16 * 6 == sum(figures.staleness.values())
        assert {w: x.sequence for w, x in figures.members.items()} == dict.fromkeys(range(16), 6)


def test_small_sums_between_workers() -> None:
    updater = Sgd()

    def count(worker: int, at: list[str]) -> list[list[int]]:
        with client(updater, "step", at, worker) as one:
            one.join()
            x = torch.tensor([worker, 2**40])
            return [one.sum(x).tolist(), one.sum(x, "max").tolist(), one.sum(x, "min").tolist()]

    with services(updater, "step", 3, 2) as running:
        at = [s.address for s in running]
        found = all_at_once(*(functools.partial(count, w, at) for w in range(3)))
    assert found == [[[3, 3 * 2**40], [2, 2**40], [0, 2**40]]] * 3


def test_rows_alone_travel() -> None:
    updater = Sgd()
    state = whole_state(updater)
    with (
        services(updater, "async", 1, 2) as running,
        client(updater, "async", [s.address for s in running], 0) as one,
    ):
        one.join()
        rows = torch.tensor([0, 4, 8])
        mine = torch.zeros(3, 2, dtype=torch.float64)
        seen = {n: x for n, x in like(updater).items() if n != "table"}
        one.pull(seen, {"table": Rows(rows, mine)})
        assert torch.equal(mine, state["table"][WEIGHT][rows])
        assert all(torch.equal(x, state[n][WEIGHT]) for n, x in seen.items())
        made = {n: torch.zeros_like(x) for n, x in seen.items()}
        one.push({**made, "table": Rows(rows, torch.ones_like(mine))}, {"lr": LR})
        found = weights(one.pull_state())
        state["table"][WEIGHT][rows] -= LR
        assert all(torch.equal(found[n], x) for n, x in weights_of(state).items())


def test_weights_come_while_a_worker_computes() -> None:
    updater = Sgd()
    with (
        services(updater, "async", 1) as running,
        client(updater, "async", [running[0].address], 0) as one,
    ):
        one.join()
        seen = like(updater)
        one.pull(seen)
        one.prefetch(seen)
        coming = one._coming
        assert coming is not None
        coming.result()
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).staleness == 0
        assert one.pull(seen).versions == {0: 0}  # from before this worker's push
        assert one.push(gradient(seen, 0, 1), {"lr": LR}).staleness == 1
        assert one.pull(seen).versions == {0: 2}


def test_other_values_are_loaded() -> None:
    updater = ClippedAdam()
    with (
        services(updater, "async", 1, 2) as running,
        client(updater, "async", [s.address for s in running], 0) as one,
    ):
        one.join()
        other = whole_state(updater, seed=7)
        other["a"]["step"] += 3
        one.push_state(other)
        found = one.pull_state()
        for name, slots in other.items():
            assert all(torch.equal(found[name][slot], x) for slot, x in slots.items())


def test_two_processes_cannot_be_one_worker() -> None:
    updater = Sgd()
    with services(updater, "async", 1) as running:
        at = [running[0].address]
        with client(updater, "async", at, 0) as first, client(updater, "async", at, 0) as second:
            first.join(), second.join()
            with pytest.raises(ServerError, match="another process has joined as worker 0"):
                first.pull(like(updater))
            second.pull(like(updater))


def test_a_worker_that_was_given_up_joins_anew() -> None:
    updater = Sgd()
    with (
        services(updater, "async", 1) as running,
        client(updater, "async", [running[0].address], 0) as one,
    ):
        one.join()
        seen = like(updater)
        one.pull(seen)
        machine = running[0].machine
        lease, machine.lease_seconds = machine.lease_seconds, 0.0
        deadline = time.monotonic() + 20
        while machine.ledger.active() and time.monotonic() < deadline:
            time.sleep(0.02)
        machine.lease_seconds = lease
        assert not one.push(gradient(seen, 0, 0), {"lr": LR}).taken
        assert one.pull(seen).versions == {0: 0}
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken


def test_a_server_that_was_stopped_for_an_hour_gives_nobody_up() -> None:
    updater = Sgd()
    with (
        services(updater, "async", 1) as running,
        client(updater, "async", [running[0].address], 0) as one,
    ):
        one.join()
        seen, service = like(updater), running[0]
        one.pull(seen)
        before, deadline = service._now, time.monotonic() + 20
        service._awake._clock = lambda: time.monotonic() + 3600.0
        while service._now < before + 2.0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert before + 2.0 <= service._now < before + 60.0
        assert 0 in service.machine.ledger.active()
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken


def test_another_script_is_refused() -> None:
    with (
        services(Sgd(), "async", 1) as running,
        client(ClippedAdam(), "async", [running[0].address], 0) as one,
        pytest.raises(ServerError, match="another update than the one that the server runs"),
    ):
        one.join()


def test_a_server_that_is_not_there() -> None:
    said = pytest.raises(CommError, match=r"no answer from server 0 \(127.0.0.1:9\)")
    with client(Sgd(), "async", ["127.0.0.1:9"], 0, timeout_seconds=0.3) as one, said:
        one.join()


@pytest.mark.parametrize(
    ("sync", "meetings"), [("step", 0), ("bounded(2)", 3), ("async", 3), ("async(after=2)", 1)]
)
def test_workers_meet_whatever_their_clocks(sync: str, meetings: int, tmp_path: Path) -> None:
    """None leaves a meeting before all have come; a common clock has a sum for it."""
    updater, events = ClippedAdam(), list[tuple[str, int]]()
    with services(updater, sync, 3, directory=tmp_path) as running:

        def work(worker: int) -> None:
            with client(updater, sync, [running[0].address], worker) as one:
                one.join()
                for k in range(3):
                    time.sleep(0.05 * worker)
                    events.append(("comes", k))
                    one.meet()
                    events.append(("leaves", k))
                    _steps(one, updater, worker if sync == "async" else 1)
                one.leave()

        all_at_once(*(functools.partial(work, w) for w in range(3)))
        ledger = running[0].machine.ledger
        assert ledger.meetings == meetings and len(ledger.closed) <= 1
    for k in range(3):
        last = max(i for i, event in enumerate(events) if event == ("comes", k))
        assert events.index(("leaves", k)) > last
