"""One server's decisions, request by request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from server.protocol.updaters import (
    LR,
    UPDATERS,
    ClippedAdam,
    Sgd,
    Whole,
    cut,
    gradient,
    joined,
    own_numbers,
    plain_step,
    weights_of,
    whole_state,
)
from tutti.errors import LayoutError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.ledger import Ledger, Record, initial
from tutti.server.protocol.machine import GATHER_SECONDS, LEASE_SECONDS, OBSERVER, Machine
from tutti.server.protocol.messages import TensorPart
from tutti.server.protocol.update import WEIGHT, ServedVariable


@dataclass
class Desk:
    """A machine, and workers that ask it by hand."""

    sync: str = "step"
    updater: Sgd | ClippedAdam = field(default_factory=Sgd)
    num_workers: int = 2
    now: float = 0.0
    journal: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = cut(self.updater, 1)
        own = dict(enumerate(self.blocks))
        ledger = Ledger(
            self.updater,
            own,
            initial(own, whole_state(self.updater)),
            parse(self.sync),
            self.num_workers,
        )
        self.machine = Machine(ledger, self.journal.append)

    def ask(self, kind: type, worker: int, incarnation: int = 1, **rest: Any) -> Any:
        """The answer; None if it has to wait. What others get stands in `self.others`."""
        request = kind(worker=worker, incarnation=incarnation, **rest)
        answers = self.machine.handle(worker, request, self.now)
        mine = [a for s, a in answers if s == worker]
        self.others = {s: a for s, a in answers if s != worker}
        return mine[0] if mine else None

    def join(self, worker: int, incarnation: int = 1, **rest: Any) -> Any:
        return self.ask(m.Join, worker, incarnation, fingerprint=self.updater.fingerprint, **rest)

    def pull(self, worker: int, clock: int, **rest: Any) -> Any:
        keys = rest.pop("keys", tuple(range(len(self.blocks))))
        return self.ask(m.Pull, worker, clock=clock, keys=keys, **rest)

    def push(self, worker: int, sequence: int, clock: int | None = None, **rest: Any) -> Any:
        clock = sequence - 1 if clock is None else clock
        made = rest.pop("made", None) or gradient(self.weights(), worker, clock)
        parts = {b.key: TensorPart(b.of(made[b.variable.name])) for b in self.blocks}
        rest = {"version": self.machine.ledger.version, "given": {"lr": LR}, "parts": parts} | rest
        return self.ask(m.Push, worker, sequence=sequence, clock=clock, **rest)

    def weights(self) -> dict[str, Tensor]:
        found = {k: s[WEIGHT] for k, s in self.machine.ledger.state.items()}
        return {n: x.clone() for n, x in joined(found, self.blocks).items()}


def same(found: dict[str, Tensor], expected: Whole) -> bool:
    return all(torch.equal(found[n], x) for n, x in weights_of(expected).items())


@pytest.mark.parametrize("text", ["step", "async", "async(damped)", "bounded(3)"])
def test_a_consistency_prints_and_parses_back(text: str) -> None:
    assert str(parse(text)) == text
    assert parse("bounded(0)") == parse("step")


@pytest.mark.parametrize("text", ["", "bounded", "bounded(-1)", "bounded(1.5)", "average(every=2)"])
def test_a_consistency_that_is_none(text: str) -> None:
    with pytest.raises(LayoutError, match="sync="):
        parse(text)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_at_clock_c_has_seen_the_clocks_before_c_less_s(bound: int) -> None:
    desk = Desk(f"bounded({bound})")
    desk.join(0), desk.join(1)
    for clock in range(bound + 1):  # the other has not begun
        assert desk.pull(0, clock).version == clock
        desk.push(0, clock + 1)
    assert desk.pull(0, bound + 1) is None
    desk.push(1, 1)
    assert desk.others[0].version == desk.machine.ledger.version  # the permit, with what was pushed
    assert desk.machine.ledger.version == (bound + 2 if bound else 1)
    assert desk.pull(0, bound + 2) is None


def test_a_worker_that_leaves_releases_its_clock() -> None:
    desk = Desk("step")
    desk.join(0), desk.join(1)
    desk.push(0, 1)
    assert desk.pull(0, 1) is None
    desk.ask(m.Leave, 1)
    assert desk.others[0].version == 1
    assert desk.ask(m.Beat, 1).reason == m.FENCED


def test_what_is_known_of_the_workers() -> None:
    """One that has not come may still do so, until the wait is over."""
    desk = Desk("async", num_workers=3)
    desk.join(1)
    asked = desk.ask(m.Status, OBSERVER)
    assert asked.workers == (1,) and asked.gone == () and asked.heard == {}
    desk.join(0)
    desk.ask(m.Beat, 0)
    desk.ask(m.Leave, 1)
    asked = desk.ask(m.Status, OBSERVER)
    assert asked.workers == (0,) and asked.gone == (1,) and asked.heard == {0: 1, 1: 1}
    desk.machine.tick(0.0)
    desk.machine.tick(GATHER_SECONDS + 1)
    assert desk.ask(m.Status, OBSERVER).gone == (0, 1, 2)


@pytest.mark.parametrize("sync", ["async(after=1)", "bounded(2, after=1)"])
def test_a_worker_that_is_silent_for_its_lease_releases_its_clock(sync: str) -> None:
    desk = Desk(sync)
    desk.join(0), desk.join(1)
    desk.push(0, 1)
    assert desk.pull(0, 1) is None
    desk.now = LEASE_SECONDS * 0.9
    desk.ask(m.Beat, 0)
    desk.now = LEASE_SECONDS
    ((source, answer),) = desk.machine.tick(desk.now)
    assert source == 0 and answer.version == 1  # type: ignore[union-attr]
    late = desk.push(1, 1)
    assert late.reason == m.FENCED and late.incarnation == 1 and late.sequence == 0


def test_step_waits_for_a_silent_worker() -> None:
    """Its update is the one of the whole batch, however late a worker is."""
    desk, start = Desk("step"), whole_state(Sgd())
    desk.join(0), desk.join(1)
    made = [gradient(weights_of(start), w, 0) for w in range(2)]
    desk.push(0, 1, made=made[0])
    assert desk.pull(0, 1) is None
    for now in range(100):
        desk.now = float(now)
        assert not desk.machine.tick(desk.now)
    assert [*desk.machine.silent(desk.now)] == [0, 1]
    assert desk.push(1, 1, made=made[1]).sequence == 1 and desk.others[0].version == 1
    plain_step(desk.updater, start, {n: made[0][n] + made[1][n] for n in made[0]}, LR)
    assert same(desk.weights(), start)


def test_a_next_life_under_step_must_not_skip_an_update() -> None:
    """Its last life pushed to another server alone."""
    desk = Desk("step")
    desk.join(0), desk.join(1)
    length = len(desk.journal)
    refused = desk.join(0, 2, clock=1)
    assert refused.reason == m.WRONG and "its rows of step 0 are missing here" in refused.text
    assert len(desk.journal) == length and desk.join(0, 2, clock=0).clock == 0


def test_without_one_worker_the_others_stand_for_it() -> None:
    """Sums are scaled by workers / present, so the step keeps its length."""
    desk = Desk("step", num_workers=3)
    for worker in range(3):
        desk.join(worker)
    start = whole_state(desk.updater)
    made = [gradient(weights_of(start), w, 0) for w in range(2)]
    for worker in range(2):
        desk.push(worker, 1, made=made[worker])
    desk.ask(m.Leave, 2)
    total = {n: (made[0][n] + made[1][n]) * 1.5 for n in made[0]}
    plain_step(desk.updater, start, total, LR)
    assert same(desk.weights(), start)


def test_one_that_joins_starts_at_the_minimum() -> None:
    desk = Desk("bounded(4)", num_workers=2)
    desk.join(0), desk.join(1)
    for k in range(4):
        desk.push(0, k + 1)
    for k in range(2):
        desk.push(1, k + 1)
    joined = desk.join(2)
    assert (joined.clock, joined.num_workers) == (2, 3)
    for k in range(4, 6):
        desk.push(0, k + 1)
    desk.push(1, 3)
    assert desk.pull(0, 7) is None  # the newcomer holds the others
    assert desk.push(2, 1, 2) and desk.others[0].version == 6 + 3 + 1


def test_one_that_joins_a_step_takes_part_in_the_clock_that_is_open() -> None:
    desk = Desk("step")
    desk.join(0), desk.join(1)
    desk.push(0, 1), desk.push(1, 1)
    desk.push(0, 2)
    assert desk.join(2).clock == 1
    desk.push(1, 2)
    assert desk.machine.ledger.version == 1
    desk.push(2, 1, 1)
    assert desk.machine.ledger.version == 2


def test_other_values_are_loaded_once() -> None:
    desk = Desk("async", ClippedAdam(), num_workers=1)
    desk.join(0)
    parts = {b.key: TensorPart(torch.full(b.shape, 3.0, dtype=torch.float64)) for b in desk.blocks}
    assert desk.ask(m.Load, 0, sequence=1, slot="second", parts=parts).sequence == 1
    assert all((s["second"] == 3).all() for s in desk.machine.ledger.state.values())
    assert desk.push(0, 2, 0, given={"lr": LR, "clip": 1.0}).sequence == 2
    assert desk.ask(m.Load, 0, sequence=1, slot="second", parts=parts).sequence == 1
    assert not any((s["second"] == 3).all() for s in desk.machine.ledger.state.values())
    steps = {b.key: TensorPart(torch.zeros(())) for b in desk.blocks}
    assert desk.ask(m.Load, 0, sequence=3, slot="step", parts=steps).reason == m.WRONG
    assert desk.pull(0, 1).numbers == {"lr": LR, "clip": 1.0}


def test_no_clock_ends_before_all_have_joined() -> None:
    desk = Desk("step")
    desk.join(0)
    desk.push(0, 1)
    assert desk.pull(0, 1) is None
    assert desk.join(1).clock == 0
    assert desk.push(1, 1) and desk.machine.ledger.version == 1


def test_one_that_never_joins_is_waited_for_a_minute() -> None:
    desk = Desk("async(after=1)")
    desk.join(0)
    desk.push(0, 1)
    assert desk.pull(0, 1) is None
    desk.machine.tick(0.0)
    for now in range(0, int(GATHER_SECONDS) + 1):
        desk.now = float(now)
        desk.ask(m.Beat, 0)
        assert not desk.machine.tick(desk.now)
    ((source, answer),) = desk.machine.tick(GATHER_SECONDS + 1)
    assert source == 0 and answer.version == 1  # type: ignore[union-attr]


def test_step_waits_for_a_worker_that_has_not_joined() -> None:
    """Without one that waits for it, the servers do not."""
    desk = Desk("step")
    desk.join(0)
    desk.push(0, 1)
    desk.machine.tick(0.0)
    assert not desk.machine.tick(10 * GATHER_SECONDS) and not desk.machine.ledger.started
    desk.ask(m.Leave, 0)
    desk.machine.tick(10 * GATHER_SECONDS)
    desk.machine.tick(11 * GATHER_SECONDS + 1)
    assert desk.machine.ledger.started


def test_a_push_that_comes_twice_is_answered_twice_and_done_once() -> None:
    desk = Desk("async", num_workers=1)
    desk.join(0)
    first = desk.push(0, 1)
    before, length = desk.weights(), len(desk.journal)
    assert desk.push(0, 1) is first
    assert same_tensors(desk.weights(), before) and len(desk.journal) == length
    desk.push(0, 2)
    assert desk.push(0, 1).sequence == 1 and desk.machine.ledger.version == 2


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_a_dead_incarnation_is_fenced() -> None:
    desk = Desk("async", num_workers=1)
    desk.join(0, 5)
    assert desk.join(0, 7).sequence == 0
    before = desk.weights()
    late = desk.push(0, 1, incarnation=5)
    assert (late.reason, late.incarnation) == (m.FENCED, 7)
    assert desk.join(0, 6).reason == m.FENCED
    assert desk.pull(0, 0, incarnation=5).reason == m.FENCED
    assert same_tensors(desk.weights(), before)


def test_a_push_that_was_acknowledged_outlives_its_worker() -> None:
    """The next life begins after it, and both count."""
    desk = Desk("step")
    start = whole_state(desk.updater)
    desk.join(0), desk.join(1)
    made = [gradient(weights_of(start), w, 0) for w in range(2)]
    desk.push(0, 1, made=made[0])
    assert desk.join(0, 2).clock == 1
    desk.push(1, 1, made=made[1])
    plain_step(desk.updater, start, {n: made[0][n] + made[1][n] for n in made[0]}, LR)
    assert same(desk.weights(), start)


def test_staleness_counts_updates_since_the_pull() -> None:
    desk = Desk("async", num_workers=2)
    desk.join(0), desk.join(1)
    assert desk.push(0, 1, version=0).staleness == 0
    assert desk.push(1, 1, version=0).staleness == 1
    assert desk.push(0, 2, version=1).staleness == 1
    assert desk.push(1, 2, version=0).staleness == 3
    assert desk.ask(m.Status, OBSERVER).staleness == {0: 1, 1: 2, 3: 1}


def test_staleness_divides_the_learning_rate() -> None:
    desk, start = Desk("async(damped)", num_workers=1), whole_state(Sgd())
    desk.join(0)
    for sequence, (version, tau) in enumerate([(0, 0), (0, 1), (0, 2), (1, 2)], 1):
        made = gradient(weights_of(start), 0, sequence)
        assert desk.push(0, sequence, version=version, made=made).staleness == tau
        plain_step(desk.updater, start, made, LR / max(1, tau))
    assert same(desk.weights(), start)


@pytest.mark.parametrize("name", sorted(UPDATERS))
def test_async_is_one_update_after_the_other(name: str) -> None:
    desk = Desk("async", UPDATERS[name](), num_workers=2)
    start = whole_state(desk.updater)
    desk.join(0), desk.join(1)
    for worker, sequence in ((0, 1), (1, 1), (1, 2), (0, 2)):
        made = gradient(desk.weights(), worker, sequence)
        numbers = own_numbers(desk.updater, made, LR)
        desk.push(worker, sequence, made=made, given=numbers)
        plain_step(desk.updater, start, made, LR)
    for n, x in weights_of(start).items():
        torch.testing.assert_close(desk.weights()[n], x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_are_pushed_and_pulled_alone(lazy: bool) -> None:
    """A table in blocks of 4 rows: what is pushed by row is what a dense gradient would do."""
    table = ServedVariable(name="t", shape=(9, 2), dtype=torch.float64, rows=True, lazy=lazy)
    desk = Desk("step", Sgd(variables=(table,)))
    start = whole_state(desk.updater)
    desk.join(0), desk.join(1)
    assert [b.shape for b in desk.blocks] == [(3, 2)] * 3
    rows = {0: {0: [0, 2], 1: [1]}, 1: {0: [2], 2: [0, 1, 2]}}
    dense = torch.zeros(9, 2, dtype=torch.float64)
    for worker, by_key in rows.items():
        parts = {}
        for key, own in by_key.items():
            values, index = torch.randn(len(own), 2, dtype=torch.float64), torch.tensor(own)
            parts[key] = TensorPart(values, rows=index)
            dense[index + 3 * key] += values
        assert desk.push(worker, 1, parts=parts).sequence == 1
    plain_step(desk.updater, start, {"t": dense}, LR)
    assert same(desk.weights(), start)
    pulled = desk.pull(0, 1, keys=(0, 2), rows={0: torch.tensor([0, 2]), 2: torch.tensor([1])})
    assert torch.equal(pulled.parts[0].values, start["t"][WEIGHT][[0, 2]])
    assert torch.equal(pulled.parts[2].values, start["t"][WEIGHT][[7]])


def test_small_sums_over_the_workers() -> None:
    desk = Desk("step", num_workers=3)
    for worker in range(3):
        desk.join(worker)
    count = {w: torch.tensor([10.0 + w, 1.0], dtype=torch.float64) for w in range(3)}
    assert desk.ask(m.Add, 0, clock=0, name="count", values=count[0]) is None
    assert desk.ask(m.Add, 0, clock=0, name="count", values=count[0] + 9) is None  # asked again
    assert desk.ask(m.Add, 1, clock=0, name="count", values=count[1]) is None
    total = desk.ask(m.Add, 2, clock=0, name="count", values=count[2])
    assert total.values.tolist() == [33.0, 3.0]
    assert {w: a.values.tolist() for w, a in desk.others.items()} == {
        0: [33.0, 3.0],
        1: [33.0, 3.0],
    }


def test_small_maxima_and_minima() -> None:
    desk = Desk("step")
    desk.join(0), desk.join(1)
    a, b = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 5.0], [3.0, 2.0]))
    for operation, expected in (("max", [3.0, 5.0]), ("min", [1.0, 2.0])):
        desk.ask(m.Add, 0, clock=0, name=operation, values=a, operation=operation)
        last = desk.ask(m.Add, 1, clock=0, name=operation, values=b, operation=operation)
        assert last.values.tolist() == expected
    desk.ask(m.Add, 0, clock=0, name="mixed", values=a)
    mixed = desk.ask(m.Add, 1, clock=0, name="mixed", values=b, operation="max")
    assert mixed.reason == m.WRONG


def test_a_small_sum_without_a_worker_is_scaled() -> None:
    desk = Desk("step", num_workers=2)
    desk.join(0), desk.join(1)
    values = torch.tensor([10.0], dtype=torch.float64)
    assert desk.ask(m.Add, 0, clock=0, name="count", values=values) is None
    desk.ask(m.Leave, 1)
    assert desk.others[0].values.tolist() == [20.0]


def test_what_was_lent_does_not_change() -> None:
    """A slow reader of weights sees those of one version, however many updates come meanwhile."""
    desk = Desk("async", num_workers=1)
    desk.join(0)
    pulled = desk.pull(0, 0)
    before = {k: p.values.clone() for k, p in pulled.parts.items()}
    desk.push(0, 1), desk.push(0, 2)
    assert all(torch.equal(p.values, before[k]) for k, p in pulled.parts.items())
    ledger = desk.machine.ledger
    for key, part in pulled.parts.items():
        ledger.give_back(key, part.values)
    again = desk.pull(0, 2)
    for key, part in again.parts.items():
        ledger.give_back(key, part.values)
    kept = {k: s[WEIGHT] for k, s in ledger.state.items()}
    desk.push(0, 3)  # nobody reads: in place
    assert all(ledger.state[k][WEIGHT] is x for k, x in kept.items())


def _bad_part(desk: Desk, part: TensorPart, key: int = 0) -> dict[int, TensorPart]:
    made = gradient(desk.weights(), 0, 0)
    return {b.key: TensorPart(b.of(made[b.variable.name])) for b in desk.blocks} | {key: part}


F64 = torch.float64
BAD: dict[str, Any] = {
    "a gap": {"sequence": 3, "clock": 0},
    "another clock": {"clock": 1},
    "a version to come": {"version": 1},
    "no learning rate": {"given": {}},
    "another number": {"given": {"lr": 1.0, "beta": 1.0}},
    "no blocks": {"parts": {}},
    "another shape": {"part": TensorPart(torch.zeros(9, dtype=F64))},
    "another dtype": {"part": TensorPart(torch.zeros(8))},
    "rows of a flat variable": {
        "part": TensorPart(torch.zeros(1, dtype=F64), rows=torch.tensor([0]))
    },
    "a row too many": {
        "part": TensorPart(torch.zeros(1, 2, dtype=F64), rows=torch.tensor([3])),
        "key": -1,
    },
    "a negative row": {
        "part": TensorPart(torch.zeros(1, 2, dtype=F64), rows=torch.tensor([-1])),
        "key": -1,
    },
    "a row twice": {
        "part": TensorPart(torch.zeros(2, 2, dtype=F64), rows=torch.tensor([1, 1])),
        "key": -1,
    },
    "a block of another server": {"part": TensorPart(torch.zeros(8, dtype=F64)), "key": 99},
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(what: str) -> None:
    desk = Desk("step")
    desk.join(0), desk.join(1)
    before, length, rest = desk.weights(), len(desk.journal), dict(BAD[what])
    if "part" in rest:
        key = rest.pop("key", 0)
        rest["parts"] = _bad_part(desk, rest.pop("part"), len(desk.blocks) - 1 if key < 0 else key)
    answer = desk.push(0, rest.pop("sequence", 1), rest.pop("clock", 0), **rest)
    assert answer.reason == m.WRONG
    assert len(desk.journal) == length and same_tensors(desk.weights(), before)
    assert desk.push(0, 1).sequence == 1


def test_who_has_not_joined_may_look_and_no_more() -> None:
    desk = Desk("async")
    assert desk.pull(OBSERVER, 0).version == 0
    assert desk.push(OBSERVER, 1).reason == m.FENCED
    assert desk.push(3, 1).reason == m.FENCED
    assert desk.ask(m.Join, 0, fingerprint="another script").reason == m.WRONG
    assert desk.ask(m.Pull, OBSERVER, clock=0, keys=(99,)).reason == m.WRONG
    assert desk.pull(OBSERVER, 0, slot="momentum").reason == m.WRONG
    assert not desk.journal


def ahead(now: dict[str, Tensor], before: dict[str, Tensor], lag: float) -> dict[str, Tensor]:
    return {n: now[n] + (lag + 1) * (now[n] - before[n]) for n in now}


def pulled(desk: Desk, worker: int, clock: int, **rest: Any) -> dict[str, Tensor]:
    return joined(
        {k: p.values for k, p in desk.pull(worker, clock, **rest).parts.items()}, desk.blocks
    )


@pytest.mark.parametrize("name", sorted(UPDATERS))
def test_workers_are_given_the_weights_to_come(name: str) -> None:
    """w + (lag + 1) (w - w before the last update), lag a mean of what was measured; observers see w."""
    desk, lag = Desk("async(predict)", UPDATERS[name](), num_workers=3), 2.0
    for worker in range(3):
        desk.join(worker)
    assert same_tensors(pulled(desk, 0, 0), desk.weights())  # nothing has moved yet
    for worker, sequence, version in ((0, 1, 0), (1, 1, 0), (2, 1, 0), (0, 2, 0), (1, 2, 4)):
        before = desk.weights()
        made = gradient(before, worker, sequence)
        numbers = own_numbers(desk.updater, made, LR)
        tau = desk.push(worker, sequence, version=version, made=made, given=numbers).staleness
        lag += (tau - lag) / 16
        expected = ahead(desk.weights(), before, lag)
        for n, x in pulled(desk, worker, sequence).items():
            torch.testing.assert_close(x, expected[n], rtol=0, atol=1e-13)
        assert same_tensors(pulled(desk, OBSERVER, 0), desk.weights())
    rows = desk.pull(
        0, 2, keys=(len(desk.blocks) - 1,), rows={len(desk.blocks) - 1: torch.tensor([0, 2])}
    )
    found = rows.parts[len(desk.blocks) - 1].values
    torch.testing.assert_close(found, expected["table"][[6, 8]], rtol=0, atol=1e-13)


def test_a_worker_that_was_stopped_carries_nobody_away() -> None:
    desk = Desk("async(predict)", num_workers=2)
    desk.join(0), desk.join(1)
    for sequence in range(1, 101):
        desk.push(0, sequence)
    lag = desk.machine.ledger.lag
    assert lag == pytest.approx((15 / 16) ** 100)
    assert desk.push(1, 1, version=0).staleness == 100
    assert desk.machine.ledger.lag == pytest.approx(lag + (4 * 2 - lag) / 16)


def test_nothing_is_predicted_from_other_values_or_from_steps_together() -> None:
    desk = Desk("async(after=1, predict)", num_workers=1)
    desk.join(0)
    desk.push(0, 1, 0)  # together
    assert same_tensors(pulled(desk, 0, 1), desk.weights())
    before = desk.weights()
    desk.push(0, 2, 1)
    expected = ahead(desk.weights(), before, desk.machine.ledger.lag)
    assert not same_tensors(desk.weights(), before)
    for n, x in pulled(desk, 0, 2).items():
        torch.testing.assert_close(x, expected[n], rtol=0, atol=1e-13)
    parts = {b.key: TensorPart(torch.full(b.shape, 3.0, dtype=torch.float64)) for b in desk.blocks}
    desk.ask(m.Load, 0, sequence=3, slot=WEIGHT, parts=parts)
    assert all((x == 3).all() for x in pulled(desk, 0, 2).values())
