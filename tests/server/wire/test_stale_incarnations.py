"""Workers that were replaced: whatever they still send is refused by name and changes nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from server.protocol.test_machine import Desk, same_tensors
from server.protocol.updaters import LR, Sgd, gradient
from server.wire.running import client, like, services
from tutti.errors import ServerError
from tutti.server.protocol import messages as m

DAY_NS = 24 * 3600 * 10**9


@pytest.mark.parametrize("sync", ["async", "step", "bounded(2)"])
def test_nothing_of_an_old_incarnation_counts(sync: str) -> None:
    desk = Desk(sync, num_workers=1)
    desk.join(0, 5)
    desk.push(0, 1, incarnation=5)
    desk.join(0, 7)
    before, length = desk.weights(), len(desk.journal)
    version = desk.machine.ledger.version
    late = [
        desk.push(0, 2, incarnation=5),
        desk.push(0, 1, incarnation=5),  # one that was acknowledged, sent again
        desk.pull(0, 0, incarnation=5),
        desk.ask(m.Beat, 0, 5),
        desk.ask(m.Leave, 0, 5),
        desk.join(0, 6),
    ]
    for answer in late:
        assert (answer.reason, answer.incarnation) == (m.FENCED, 7), answer
        assert "worker 0 has been replaced" in answer.text
    assert same_tensors(desk.weights(), before) and len(desk.journal) == length
    assert desk.machine.ledger.version == version
    assert desk.machine.ledger.members[0].active


def test_a_worker_that_was_replaced_over_a_socket_is_told_so() -> None:
    with services(Sgd(), "async", 1) as running:
        address = [running[0].address]
        with client(Sgd(), "async", address, 0) as old, client(Sgd(), "async", address, 0) as new:
            seen = like(Sgd())
            old.join()
            old.pull(seen)
            assert old.push(gradient(seen, 0, 0), {"lr": LR}).taken
            new.join()
            with pytest.raises(ServerError, match="another process has joined as worker 0"):
                old.push(gradient(seen, 0, 1), {"lr": LR})
            assert new.status()[0].version == 1
            new.pull(seen)
            assert new.push(gradient(seen, 0, new.clock), {"lr": LR}).taken
            assert new.status()[0].version == 2


@pytest.mark.parametrize("jump", [-DAY_NS, DAY_NS])
def test_a_worker_comes_back_when_the_clock_has_jumped(
    jump: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incarnation is the wall clock's time where that is larger than the last one."""
    real: Any = time.time_ns
    with services(Sgd(), "async", 1) as running:
        address = [running[0].address]
        with client(Sgd(), "async", address, 0) as first:
            first.join()
            seen = like(Sgd())
            first.pull(seen)
            assert first.push(gradient(seen, 0, 0), {"lr": LR}).taken
        monkeypatch.setattr(time, "time_ns", lambda: real() + jump)
        with client(Sgd(), "async", address, 0) as again:
            again.join()
            again.pull(seen)
            assert again.push(gradient(seen, 0, again.clock), {"lr": LR}).taken
            assert again.status()[0].version == 2
