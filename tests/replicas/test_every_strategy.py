"""What holds for every strategy: where replicas agree, where nothing pulls them apart, what is kept."""

from __future__ import annotations

import copy

import pytest
import torch

from replicas_every import (
    CALLED,
    COMPRESSED,
    EXACT,
    NAMES,
    descending,
    difference,
    mean_of,
    play,
    some_weights,
    spread_of,
    still,
    sum_of,
)
from tutti.errors import LayoutError
from tutti.replicas.gossip import MASS
from tutti.replicas.pieces import cut
from tutti.replicas.strategies import parse
from tutti.replicas.virtual_replicas import Replicas

STEPS = 40


@pytest.mark.parametrize(("text", "count"), EXACT + COMPRESSED + CALLED)
def test_equal_replicas_without_a_gradient_stay_as_they_are(text: str, count: int) -> None:
    start = some_weights(0)
    seen = play(text, [dict(start) for _ in range(count)], STEPS, still)
    assert max(difference(own, start) for after in seen for own in after) < 1e-13


@pytest.mark.parametrize(
    ("text", "count"),
    [case for case in EXACT + COMPRESSED + CALLED if not case[0].startswith("elastic")],
)
def test_equal_replicas_with_equal_gradients_stay_equal(text: str, count: int) -> None:
    start = some_weights(0)
    seen = play(
        text, [dict(start) for _ in range(count)], STEPS, lambda r, k, w: descending(0, k, w)
    )
    assert max(map(spread_of, seen)) < 1e-13
    assert difference(seen[-1][0], start) > 0.1  # and they have moved


@pytest.mark.parametrize(
    ("text", "count"), [case for case in EXACT if not case[0].startswith("diloco")]
)
def test_different_replicas_contract_to_their_mean(text: str, count: int) -> None:
    weights = [some_weights(r) for r in range(count)]
    seen = play(text, weights, 240, still)
    mean = mean_of(weights)
    assert spread_of(weights) > 1
    assert max(difference(own, mean) for own in seen[-1]) < 1e-12


@pytest.mark.parametrize(
    "text", ["diloco(every=3, lr=1.0)", "diloco(every=4, fragments=2, delay=2, momentum=0.3)"]
)
def test_diloco_brings_replicas_together_and_settles(text: str) -> None:
    """Its first rounds may go past the mean; from equal starts with different pulls they stay near."""
    start = some_weights(9)
    seen = play(text, [dict(start) for _ in range(4)], 400, descending)
    middle = mean_of([some_weights(1000 + r) for r in range(4)])
    assert max(difference(own, middle) for own in seen[-1]) < 1.0
    assert difference(mean_of(seen[-1]), middle) < 1e-6


@pytest.mark.parametrize(("text", "count"), EXACT + CALLED)
def test_replicas_agree_on_weights_that_join_later_and_rest(text: str, count: int) -> None:
    first, later, start = NAMES[:3], NAMES[3:], some_weights(0)
    replicas = Replicas(parse(text), first, [{n: start[n] for n in first} for _ in range(count)])
    weights = [dict(start) for _ in range(count)]
    for step in range(1, 400):
        if step == 8:
            replicas.join(later, [{n: start[n] for n in later} for _ in range(count)], step)
        if step == 30:
            replicas.trained = []
        if step < 30:
            weights = [
                own | {n: descending(r, step, own)[n] for n in replicas.trained}
                for r, own in enumerate(weights)
            ]
        changed = replicas.after(step, weights)
        weights = [own | new for own, new in zip(weights, changed, strict=True)]
        if step == 20:
            assert all(
                difference({**start, n: own[n]}, start) > 0.01 for own in weights for n in later
            )
    assert spread_of(weights) < 1e-8


@pytest.mark.parametrize(("text", "count"), [case for case in EXACT if "gossip" in case[0]])
def test_gossip_keeps_the_sums_of_weights_and_of_mass(text: str, count: int) -> None:
    weights = [some_weights(r) for r in range(count)]
    replicas = Replicas(parse(text), NAMES, weights)
    mass_differs = False
    for step in range(1, STEPS + 1):
        changed = replicas.after(step, weights)
        weights = [own | new for own, new in zip(weights, changed, strict=True)]
        members = replicas.members
        underway = [m for messages in replicas.underway.values() for m in messages]
        mass_differs |= bool(underway)
        for n in NAMES:
            mass = sum(float(m.state[f"mass.{n}"]) for m in members)
            mass += sum(float(m[MASS + n]) for m in underway)
            assert mass == pytest.approx(count, abs=1e-12)
            held = torch.stack([m.state[f"biased.{n}"] for m in members]).sum(0)
            total = held + sum(m[n] for m in underway)
            expected = torch.stack([some_weights(r)[n] for r in range(count)]).sum(0)
            torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    assert mass_differs == ("delay" in text)


@pytest.mark.parametrize(("text", "count"), EXACT + COMPRESSED + CALLED)
def test_functions_change_nothing_that_they_are_given(text: str, count: int) -> None:
    strategy = parse(text)
    weights, received = some_weights(0), some_weights(1)
    state = strategy.init(weights)
    for step in range(1, 2 * strategy.period + 1 + strategy.warm_up):
        for due in strategy.rounds(step, count):
            before = copy.deepcopy((state, weights, received))
            changed, own, message = strategy.offer(state, weights, due)
            reply = received | {n: x for n, x in message.items() if n not in received}
            taken, landed = strategy.take(state | changed, own, reply, due)
            now = (state, weights, received)
            for a, b in zip(before, now, strict=True):
                assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
            assert changed.keys() | taken.keys() <= state.keys()
            remembered = {x.data_ptr() for x in (state | changed | taken).values()}
            assert not remembered & {x.data_ptr() for x in landed.values()}


@pytest.mark.parametrize("text", ["diloco(every=2, delay=1)", "gossip(every=2, delay=1)"])
def test_a_message_under_way_is_a_copy(text: str) -> None:
    """A thread sends it while the next step changes weights and statistics in place."""
    weights, buffers = some_weights(0), {"norm.running_mean": torch.ones(4)}
    member = Replicas(parse(text), NAMES, [weights, weights]).members[0]
    member.roster.train(NAMES, 2)
    (due,) = parse(text).rounds(2, 2)
    _, message = member.begin(due, weights, buffers)
    assert message.keys() >= weights.keys()
    assert ("norm.running_mean" in message) == text.startswith("diloco")
    live = {x.data_ptr() for x in (weights | buffers).values()}
    assert not live & {x.data_ptr() for x in message.values()}


@pytest.mark.parametrize(("text", "count"), EXACT + COMPRESSED + CALLED)
def test_a_schedule_repeats_and_all_of_the_weights_take_part(text: str, count: int) -> None:
    strategy = parse(text)
    first, period = strategy.warm_up, strategy.period
    for step in range(first + 1, first + 3 * period):
        begun = [(r.kind, r.fragment, r.group) for r in strategy.rounds(step, count)]
        again = [(r.kind, r.fragment, r.group) for r in strategy.rounds(step + period, count)]
        assert begun == again
    seen = [r for k in range(first + 1, first + period + 1) for r in strategy.rounds(k, count)]
    assert {r.fragment for r in seen} == set(range(strategy.num_fragments))
    assert all(0 <= r.lands - r.begins <= strategy.longest_delay for r in seen)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "text", ["average(every=2)", "diloco(every=2)", "gossip(every=2)", "pairs(every=2)"]
)
def test_what_cannot_be_averaged_is_refused(text: str, dtype: torch.dtype) -> None:
    weights = some_weights(0) | {"head.weight": torch.zeros(2, 4, dtype=dtype)}
    with pytest.raises(LayoutError) as caught:
        Replicas(parse(text), NAMES, [weights])
    name = str(dtype).removeprefix("torch.")
    assert f'cannot average "head.weight" ({name}) in sync={text}' in str(caught.value)
    assert "float64, float32, bfloat16, float16" in caught.value.why


@pytest.mark.parametrize(("text", "count"), CALLED)
def test_calls_keep_the_sum_of_all_that_they_touch(text: str, count: int) -> None:
    """Elastic: all weights and the centre; pairs: what replicas share. So both settle on known means."""
    weights = [some_weights(r) for r in range(count)]
    replicas = Replicas(parse(text), NAMES, weights)
    elastic = text.startswith("elastic")
    owner = {p.key: i for i, part in enumerate(cut(weights[0], count)) for p in part}
    pieces = [p for part in cut(weights[0], count) for p in part]

    def total() -> dict[str, torch.Tensor]:
        held = [m.state for m in replicas.members]
        if not elastic:
            return {n: sum_of([h[f"shared.{n}"] for h in held]) for n in NAMES}
        sums = {n: sum_of([own[n] for own in weights]) for n in NAMES}
        for p in pieces:
            centre = {p.name: held[owner[p.key]][f"centre.{p.name}"]}
            p.of(sums).add_(p.of(centre))
        return sums

    first = total()
    for step in range(1, 400):
        changed = replicas.after(step, weights)
        weights = [own | new for own, new in zip(weights, changed, strict=True)]
        assert difference(total(), first) < 1e-11
    places = count + 1 if elastic else count
    assert max(difference({n: x * places for n, x in own.items()}, first) for own in weights) < 1e-8


@pytest.mark.parametrize("count", range(2, 17))
def test_a_message_of_gossip_reaches_everybody(count: int) -> None:
    """After as many rounds as hops, each replica has heard of every other, and each gets one message."""
    strategy = parse("gossip()")
    heard = [{r} for r in range(count)]
    for step in range(1, (count - 1).bit_length() + 1):
        (due,) = strategy.rounds(step, count)
        assert 0 < due.hop < count
        heard = [heard[r] | heard[r - due.hop] for r in range(count)]
    assert all(len(known) == count for known in heard)
