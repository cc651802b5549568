"""The protocol under every fault, in a simulated network: nothing is lost and nothing happens twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.protocol.broken import answers_first, fences_nobody, forgets_sequences
from server.protocol.updaters import (
    LR,
    UPDATERS,
    ClippedAdam,
    Sgd,
    gradient,
    joined,
    plain_step,
    weights_of,
    whole_state,
)
from server.protocol.world import Faults, World
from tutti.server.protocol import machine
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency, parse
from tutti.server.protocol.ledger import Applied, Closed, Departed, Entered
from tutti.server.protocol.machine import Machine
from tutti.server.protocol.messages import Push, Reply
from tutti.server.protocol.session import Session

ALL = (
    "step",
    "bounded(0)",
    "bounded(2)",
    "async",
    "async(after=2, predict)",
    "bounded(1, after=1)",
)


def check(world: World) -> None:
    """Replay of the log is the state; each push once; none lost that was acknowledged."""
    for server, host in enumerate(world.hosts):
        assert host.machine is not None
        again = world.new_machine(server, lambda record: None)
        for record in host.disk:
            again.ledger.take(record)
        for key, slots in host.machine.ledger.state.items():
            for slot, x in slots.items():
                assert torch.equal(again.ledger.state[key][slot], x)
        assert again.ledger.lag == host.machine.ledger.lag
        pushes = [r for r in host.disk if isinstance(r, Push)]
        logged = Counter((p.worker, p.incarnation, p.sequence) for p in pushes)
        assert set(logged.values()) <= {1}
        assert set(world.acknowledged) <= set(logged)
        living: dict[int, int] = {}
        for record in host.disk:  # none of a dead incarnation
            if isinstance(record, Entered):
                living[record.worker] = record.incarnation
            elif isinstance(record, Departed):
                del living[record.worker]
            elif isinstance(record, Push):
                assert living[record.worker] == record.incarnation
        for push in pushes:  # and as it was made
            made = world.made[push.worker, push.incarnation, push.sequence]
            for key, part in push.parts.items():
                block = world.blocks[key]
                assert torch.equal(part.values, block.of(made[block.variable.name]))
        check_updates(world, server, pushes)


def check_updates(world: World, server: int, pushes: list[Push]) -> None:
    """Each acknowledged push is in exactly one update, and no worker was further ahead than allowed."""
    ledger = world.hosts[server].machine.ledger  # type: ignore[union-attr]
    assert sum(ledger.staleness.values()) == len(pushes)
    after = world.consistency.after if world.consistency.apart else ledger.version
    apart = [p for p in pushes if world.consistency.alone(p.clock)]
    if apart:
        assert ledger.version == after + len(apart)
        check_permits(world, server)
    disk = world.hosts[server].disk
    pushes = [p for p in pushes if not world.consistency.alone(p.clock)]
    closed = {r.clock: r.workers for r in disk if isinstance(r, Closed) and not r.name}
    applied = [r.clock for r in disk if isinstance(r, Applied)]
    assert applied == list(range(min(after, ledger.version)))
    by_clock = {c: tuple(sorted(p.worker for p in pushes if p.clock == c)) for c in applied}
    assert by_clock == {c: closed[c] for c in applied}
    assert all(push.clock == push.version for push in pushes)
    assert ledger.staleness[0] >= len(pushes) and (apart or set(ledger.staleness) <= {0})


def check_permits(world: World, server: int) -> None:
    """At no push was its worker further ahead of the slowest than it may be."""
    again, bound = world.new_machine(server, lambda record: None).ledger, world.consistency.bound
    for record in world.hosts[server].disk:
        if isinstance(record, Push) and bound is not None and again.alone:
            assert record.clock - min(x.clock for x in again.active().values()) <= bound
        again.take(record)


def states(world: World) -> dict[str, torch.Tensor]:
    found = {k: s["weight"] for h in world.hosts for k, s in h.machine.ledger.state.items()}  # type: ignore[union-attr]
    return joined(found, world.blocks)


def synchronous(
    updater: Sgd | ClippedAdam, num_workers: int, steps: int
) -> dict[str, torch.Tensor]:
    """One device, with the sum of all workers' gradients."""
    state = whole_state(updater)
    for clock in range(steps):
        each = [gradient(weights_of(state), w, clock) for w in range(num_workers)]
        total = {n: sum(g[n] for g in each[1:]) + each[0][n] for n in each[0]}
        plain_step(updater, state, total, LR)
    return weights_of(state)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("name", sorted(UPDATERS))
@pytest.mark.parametrize("sync", ["step", "bounded(0)"])
def test_step_is_one_device(sync: str, name: str, num_servers: int) -> None:
    """Whatever the network does, as long as nobody dies."""
    faults = Faults(drop=0.2, duplicate=0.2, delay=0.3)
    world = World(
        UPDATERS[name](), parse(sync), faults=faults, num_workers=3, num_servers=num_servers
    )
    world.run()
    check(world)
    for n, x in synchronous(UPDATERS[name](), 3, 4).items():
        torch.testing.assert_close(states(world)[n], x, rtol=1e-13, atol=1e-13)


def test_the_bits_do_not_depend_on_the_network_or_the_number_of_servers() -> None:
    found = []
    for seed, num_servers in ((0, 1), (1, 2), (2, 3)):
        faults = Faults(drop=0.1 * seed, duplicate=0.1 * seed, delay=0.1 + seed)
        world = World(
            ClippedAdam(), Consistency(), seed=seed, faults=faults, num_servers=num_servers
        )
        world.run()
        found.append(states(world))
    for other in found[1:]:
        assert all(torch.equal(other[n], x) for n, x in found[0].items())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    sync=st.sampled_from(ALL),
    name=st.sampled_from(sorted(UPDATERS)),
    num_workers=st.integers(1, 3),
    num_servers=st.integers(1, 2),
    faults=st.builds(
        Faults,
        drop=st.sampled_from([0.0, 0.1, 0.3]),
        duplicate=st.sampled_from([0.0, 0.3]),
        delay=st.sampled_from([0.0, 0.1, 1.0]),
        cuts=st.lists(
            st.tuples(st.floats(0, 5), st.floats(0, 12), st.integers(0, 2), st.integers(0, 1)),
            max_size=2,
        ).map(tuple),
        slow=st.sampled_from([(), (0,), (1,)]),
        kill_server=st.none()
        | st.tuples(st.integers(0, 1), st.integers(0, 30), st.sampled_from(["before", "after"])),
        kill_worker=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 20), st.booleans()),
    ),
)
def test_nothing_is_lost_and_nothing_happens_twice(
    seed: int, sync: str, name: str, num_workers: int, num_servers: int, faults: Faults
) -> None:
    world = World(
        UPDATERS[name](),
        parse(sync),
        seed=seed,
        faults=faults,
        num_workers=num_workers,
        num_servers=num_servers,
        steps=3,
    )
    world.run()
    check(world)


@pytest.mark.parametrize("sync", ALL)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_killed_at_every_record(sync: str, when: str) -> None:
    """Between any two things that it does, on one of two servers; then the result is the same."""
    killed = 0
    for record in range(60):
        faults = Faults(kill_server=(0, record, when))
        world = World(ClippedAdam(), parse(sync), faults=faults, num_servers=2, steps=3)
        world.run()
        check(world)
        killed += world.kill_server is None
        if world.kill_server is not None:  # it never came so far
            break
        assert sync != "step" or _equal(states(world), synchronous(ClippedAdam(), 2, 3))
    assert killed >= 8


@pytest.mark.parametrize("sync", ALL)
@pytest.mark.parametrize("again", [True, False])
def test_a_worker_killed_at_every_reply(sync: str, again: bool) -> None:
    """The others go on without it, or with its next life; under `step` only with that, as one device."""
    killed = 0
    for reply in range(60):
        faults = Faults(kill_worker=(1, reply, again))
        world = World(ClippedAdam(), parse(sync), faults=faults, num_servers=2, steps=3)
        world.run()
        check(world)
        if world.kill_worker is not None:
            break
        killed += 1
        if sync in ("step", "bounded(0)") and again and world.finished:
            assert _equal(states(world), synchronous(ClippedAdam(), 2, 3))
    assert killed >= 8


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(found[n], x, rtol=1e-12, atol=1e-12) for n, x in expected.items())


def _breaks(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "sequences":
        monkeypatch.setitem(machine._HANDLE, Push, forgets_sequences)
    elif what == "journal":
        monkeypatch.setattr(Machine, "_decide", answers_first)
    else:
        monkeypatch.setattr(Machine, "_refuse_stranger", fences_nobody)


@pytest.mark.parametrize("what", ["sequences", "journal", "fence"])
def test_the_check_finds_a_broken_server(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults put in on purpose: one of a few runs fails."""
    _breaks(monkeypatch, what)
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
        for seed in range(40):
            faults = Faults(drop=0.2, duplicate=0.5, delay=1.0, kill_worker=(0, 3 + seed % 4, True))
            world = World(Sgd(), parse("async"), seed=seed, faults=faults)
            world.run()
            check(world)


def test_drawn_schedules() -> None:
    """A few hundred of those that `benchmarks/server_schedules.py` plays a million of."""
    from benchmarks.server_schedules import drawn, play_some

    assert play_some(range(400)) == []
    worlds = [drawn(seed) for seed in range(100)]
    assert {(w.num_workers, w.num_servers) for w in worlds} >= {(1, 1), (2, 1), (3, 2)}
    assert {str(w.consistency) for w in worlds} == {str(parse(sync)) for sync in ALL}
    assert any(w.kill_server and w.kill_worker for w in worlds)


@pytest.mark.parametrize("seed", [72075, 85625])
def test_a_worker_that_is_given_up_while_it_joins_begins_at_one_clock(seed: int) -> None:
    """Its lease ended on one of two servers between the two rounds of its join: it began there a clock later,
    and all waited for each other."""
    from benchmarks.server_schedules import play

    assert play(seed) == ""


def test_a_join_ends_at_one_clock() -> None:
    """However often servers answer with different ones, or as to a stranger."""
    session = Session(0, 2, (), "sgd", parse("step"), False, 1)

    def joined(clock: int) -> Reply:
        return m.JoinReply(clock=clock, version=1, sequence=0, num_workers=2)

    asking = session.join()
    assert next(asking)[0].clock == -1  # type: ignore[attr-defined]
    asked = asking.send({0: joined(0), 1: joined(1)})
    assert [x.clock for x in asked.values()] == [1, 1]  # type: ignore[attr-defined]
    fenced = m.Refused(reason=m.FENCED, text="", incarnation=1)
    asked = asking.send({0: fenced, 1: joined(1)})
    assert [x.incarnation for x in asked.values()] == [2, 2]
    asked = asking.send({0: joined(2), 1: joined(1)})  # a clock has ended there in between
    assert [x.clock for x in asked.values()] == [2, 2]  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        asking.send({0: joined(2), 1: joined(2)})
    assert session.clock == 2


def test_a_schedule_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.server_schedules import play_some

    _breaks(monkeypatch, "journal")
    failed = play_some(range(60))
    assert failed and all(error and 0 <= seed < 60 for seed, error in failed)
    assert play_some(range(failed[0][0], failed[0][0] + 1))  # its seed plays it again
