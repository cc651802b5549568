"""Workers that are together for some clocks and then run apart: `async(after=N)`, `bounded(s, after=N)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import tutti
from server.protocol.test_machine import Desk, same
from server.protocol.test_simulated import check, states, synchronous
from server.protocol.updaters import (
    LR,
    UPDATERS,
    Sgd,
    gradient,
    own_numbers,
    plain_step,
    weights_of,
    whole_state,
)
from server.protocol.world import Faults, World
from server.split.steps import Model, batch, by_norm
from server.split.steps import step as train_step
from tutti.errors import ServerError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.machine import Machine
from tutti.serving import server_side


def sent(desk: Desk, worker: int, clock: int, version: int) -> dict[str, torch.Tensor]:
    """Push a gradient of the weights of now, alone in its update; the gradient."""
    made = gradient(desk.weights(), worker, clock)
    numbers = own_numbers(desk.updater, made, LR)
    done = desk.push(worker, clock + 1, made=made, given=numbers, version=version)
    assert done.sequence == clock + 1
    return made


@pytest.mark.parametrize("name", sorted(UPDATERS))
@pytest.mark.parametrize("sync", ["async(after=2)", "bounded(3, after=2)"])
def test_two_updates_are_made_together_and_each_push_after_them_is_one(
    sync: str, name: str
) -> None:
    desk = Desk(sync, UPDATERS[name]())
    start = whole_state(desk.updater)
    desk.join(0), desk.join(1)
    for clock in range(2):
        made = [gradient(weights_of(start), w, clock) for w in range(2)]
        for w in range(2):
            assert desk.pull(w, clock).version == clock
            desk.push(w, clock + 1, made=made[w])
            assert desk.machine.ledger.version == clock + w
        plain_step(desk.updater, start, {n: made[0][n] + made[1][n] for n in made[0]}, LR)
    for worker, clock in ((0, 2), (0, 3), (1, 2), (0, 4)):
        assert desk.pull(worker, clock).version == desk.machine.ledger.version
        plain_step(desk.updater, start, sent(desk, worker, clock, 2), LR)
    for n, x in weights_of(start).items():
        torch.testing.assert_close(desk.weights()[n], x, rtol=1e-14, atol=1e-14)
    assert desk.machine.ledger.version == 2 + 4
    assert dict(desk.machine.ledger.staleness) == {0: 5, 1: 1, 2: 1, 3: 1}


def test_nobody_goes_apart_before_all_are_through() -> None:
    desk = Desk("async(after=1)")
    desk.join(0), desk.join(1)
    desk.push(0, 1)
    assert desk.pull(0, 1) is None
    early = desk.push(0, 2)
    assert early.reason == m.WRONG and "clock 1 after 0 updates" in early.text
    x = torch.ones(1, dtype=torch.float64)
    assert desk.ask(m.Add, 0, clock=1, name="count", values=x).reason == m.WRONG
    assert desk.ask(m.Add, 1, clock=0, name="count", values=x).values == 2  # stands for both
    desk.push(1, 1)
    assert desk.machine.ledger.version == 1 and set(desk.others) == {0}
    assert desk.push(0, 2).sequence == 2
    assert desk.ask(m.Add, 1, clock=1, name="count", values=x).reason == m.WRONG


def test_one_that_leaves_in_the_last_clock_together_lets_the_others_go_apart() -> None:
    desk, start = Desk("async(after=1)", num_workers=3), whole_state(Sgd())
    for worker in range(3):
        desk.join(worker)
    made = [gradient(weights_of(start), w, 0) for w in range(2)]
    for worker in range(2):
        desk.push(worker, 1, made=made[worker])
    desk.ask(m.Leave, 2)
    plain_step(desk.updater, start, {n: (made[0][n] + made[1][n]) * 1.5 for n in made[0]}, LR)
    assert same(desk.weights(), start)  # stood for, as under step
    alone = gradient(weights_of(start), 0, 1)
    desk.push(0, 2, made=alone)
    plain_step(desk.updater, start, alone, LR)
    assert same(desk.weights(), start)  # and now as it is


def test_one_that_joins_begins_in_the_phase_that_is_on() -> None:
    desk = Desk("async(after=2)")
    desk.join(0), desk.join(1)
    desk.push(0, 1), desk.push(1, 1)
    assert desk.join(2).clock == 1
    for worker, sequence in ((0, 2), (1, 2), (2, 1)):
        desk.push(worker, sequence, 1)
    desk.push(0, 3)
    assert desk.join(3).clock == 2 and desk.machine.ledger.version == 3
    for worker in range(4):
        desk.ask(m.Leave, worker)
    assert desk.join(4).clock == 2  # never again together
    assert desk.push(4, 1, 2).sequence == 1


def test_the_next_life_of_one_that_pushed_in_the_last_clock_together() -> None:
    """Its push counts; it waits for the others, and goes apart with them."""
    desk = Desk("bounded(1, after=1)")
    desk.join(0), desk.join(1)
    desk.push(0, 1)
    assert desk.join(0, 2).clock == 1
    assert desk.pull(0, 1, incarnation=2) is None
    desk.push(1, 1)
    assert desk.machine.ledger.version == 1 and set(desk.others) == {0}
    assert desk.push(0, 1, 1, incarnation=2).sequence == 1


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("name", sorted(UPDATERS))
def test_the_steps_together_are_one_device(name: str, num_servers: int) -> None:
    faults = Faults(drop=0.2, duplicate=0.2, delay=0.3)
    rest = {"faults": faults, "num_workers": 3, "num_servers": num_servers}
    world = World(UPDATERS[name](), parse("async(after=4)"), **rest)  # type: ignore[arg-type]
    world.run()
    check(world)
    for n, x in synchronous(UPDATERS[name](), 3, 4).items():
        torch.testing.assert_close(states(world)[n], x, rtol=1e-13, atol=1e-13)


def test_the_check_finds_a_switch_that_comes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes a clock as soon as one worker has pushed for it."""

    def close(self: Machine) -> bool:
        ledger, active = self.ledger, self.ledger.active
        monkeypatch.setattr(ledger, "active", lambda: dict(list(active().items())[:1]))
        try:
            return CLOSE(self)
        finally:
            monkeypatch.setattr(ledger, "active", active)

    monkeypatch.setattr(Machine, "_close", close)
    with pytest.raises((AssertionError, KeyError, ServerError)):
        for seed in range(10):
            world = World(Sgd(), parse("async(after=2)"), seed=seed, num_workers=3)
            world.run()
            check(world)


CLOSE = Machine._close


@pytest.mark.parametrize(("made", "clock", "apart"), [(1, 1, False), (3, 3, True), (9, 3, True)])
def test_a_run_that_goes_on_from_a_checkpoint_counts_on(made: int, clock: int, apart: bool) -> None:
    desk = Desk("async(after=3)", num_workers=1)
    desk.machine.ledger.version = made
    assert desk.join(0).clock == clock and desk.pull(0, clock).version == made
    assert desk.push(0, 1, clock).staleness == 0
    assert desk.machine.ledger.version == made + 1
    assert bool(desk.machine.ledger.closed or desk.machine.ledger.pending) is False
    assert [type(r).__name__ for r in desk.journal] == ["Entered", "Push"] + (
        [] if apart else ["Closed", "Applied"]
    )


def test_servers_begin_where_the_checkpoint_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lease of the environment."""
    found: list[int] = []
    monkeypatch.setenv("TUTTI_LEASE", "17")

    def service(*_: Any, version: int, lease_seconds: float, **__: Any) -> Any:
        found.append(version)
        assert lease_seconds == 17.0
        raise KeyboardInterrupt

    monkeypatch.setattr(server_side, "Service", service)
    monkeypatch.setenv("TUTTI_ROLE", "server 0")
    for sync in ("async(after=9)", "async", "step"):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = tutti.distribute(
            partial(train_step, by_norm), model, optimizer, f"replica=2 server=1 sync={sync}"
        )
        step.num_steps = 7
        with pytest.raises(KeyboardInterrupt):
            step(*batch(0, 12))
    assert found == [7, 0, 7]
