"""Messages in few bits: what they cost, what is lost, and that it is sent later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.comm.collectives.compression import COMPRESSIONS
from tutti.replicas import traffic
from tutti.replicas.mean import Mean, mean_of
from tutti.replicas.pieces import cut, joined

COMPRESSED = pytest.mark.parametrize("compression", sorted(COMPRESSIONS))


def message(seed: int, scale: float = 1.0) -> traffic.Message:
    chance = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(40, 30, generator=chance) * scale,
        "b": torch.randn(7, generator=chance) * scale * 1e-3 + scale * 2e-3,
    }


def means(
    compression: str, messages: list[traffic.Message], states: list[traffic.State]
) -> list[traffic.Message]:
    """What each replica takes of a mean; `states` then has what was lost."""
    count = len(messages)
    sides = [
        Mean(compression, message, state, i, count)
        for i, (message, state) in enumerate(zip(messages, states, strict=True))
    ]
    parts = [side.combine(j, [s.parts[j] for s in sides]) for j, side in enumerate(sides)]
    for side, state in zip(sides, states, strict=True):
        state |= side.errors
    return [side.assemble(parts) for side in sides]


@COMPRESSED
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_was_taken_is_what_was_to_be_sent_less_the_last_errors(
    compression: str, count: int
) -> None:
    """After any number of rounds, so nothing is ever lost: the mean error falls as 1 / rounds."""
    states = [traffic.no_error(compression, message(0)) for _ in range(count)]
    wanted = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in message(0).items()}
    arrived = {n: x.clone() for n, x in wanted.items()}
    for k in range(100):
        xs = [message(k * count + i, 1.0 + (k + i) % 3) for i in range(count)]
        taken = means(compression, xs, states)
        for n in wanted:
            assert all(torch.equal(one[n], taken[0][n]) for one in taken)
            wanted[n] += sum(x[n] for x in xs) / count
            arrived[n] += taken[0][n]
    for n, x in wanted.items():
        left = torch.stack([state[f"error.{n}"].double() for state in states]).mean(0)
        assert 0 < left.abs().max() < 0.4
        torch.testing.assert_close(arrived[n] + left, x, rtol=0, atol=2e-4)


@COMPRESSED
def test_without_feedback_a_small_constant_beside_large_values_never_arrives(
    compression: str,
) -> None:
    """What the feedback is for: the same message again and again."""
    x = {"a": torch.tensor([1000.0, 1.0009765625, 1e-4])}
    states = [traffic.no_error(compression, x) for _ in range(2)]
    with_it, without = torch.zeros(3), torch.zeros(3)
    for _ in range(512):
        with_it += means(compression, [x, x], states)[0]["a"] / 512
        fresh = [traffic.no_error(compression, x) for _ in range(2)]
        without += means(compression, [x, x], fresh)[0]["a"] / 512
    relative = ((with_it - x["a"]) / x["a"]).abs()
    assert relative[:2].max() < 0.05
    assert ((without - x["a"]) / x["a"]).abs()[1] > relative[1]


@pytest.mark.parametrize(("compression", "nbytes"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_bytes_on_the_way(compression: str, nbytes: int, count: int) -> None:
    """2 (R - 1) / R of a message, so few bits save at any number of replicas."""
    x = message(0)
    total = sum(v.numel() for v in x.values())
    state = traffic.no_error(compression, x)
    sides = [Mean(compression, x, dict(state), i, count) for i in range(count)]
    for i, side in enumerate(sides):
        sent = [v for j, part in enumerate(side.parts) if j != i for v in part.values()]
        sent += [*side.combine(i, [s.parts[i] for s in sides]).values()] * (count - 1)
        scales = sum(v.numel() == 1 and v.ndim == 0 for v in sent)
        assert scales == (compression == "int8") * (len(sent) // 2)
        numbers = sum(v.nbytes for v in sent) - 4 * scales
        assert numbers == pytest.approx(2 * (count - 1) / count * total * nbytes, abs=16 * count)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=20),
    st.sampled_from(sorted(COMPRESSIONS)),
)
def test_any_finite_numbers_come_back_finite(values: list[float], compression: str) -> None:
    x = {"a": torch.tensor(values, dtype=torch.float32)}
    state = traffic.no_error(compression, x)
    (taken,) = means(compression, [x], [state])
    back = taken["a"]
    assert back.shape == x["a"].shape and back.isfinite().all()
    torch.testing.assert_close(back + state["error.a"], x["a"], rtol=1e-6, atol=0)


@COMPRESSED
def test_what_has_no_error_goes_as_it_is(compression: str) -> None:
    x = message(0) | {"statistics": torch.randn(5)}
    state = traffic.no_error(compression, message(0))
    taken = means(compression, [x, x], [state, dict(state)])
    assert "error.statistics" not in state
    assert torch.equal(taken[0]["statistics"], x["statistics"]) and taken[0].keys() == x.keys()


def test_the_mean_of_half_types_is_taken_in_float32() -> None:
    parts = [{"a": torch.full((4,), 1.0, dtype=torch.bfloat16)} for _ in range(3)]
    parts[1]["a"] += 2**-7
    assert torch.equal(mean_of(parts)["a"], torch.full((4,), 1 + 2**-7 / 3).bfloat16())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_pieces_are_equal_parts_of_all_numbers(sizes: list[int], count: int) -> None:
    tensors = {f"t{i}": torch.arange(float(n)) + 100 * i for i, n in enumerate(sizes)}
    parts = cut(tensors, count)
    lengths = [sum(p.end - p.begin for p in part) for part in parts]
    assert len(parts) == count and max(lengths) - min(lengths) <= 1
    pieces = [p for part in parts for p in part]
    assert len({p.key for p in pieces}) == len(pieces)
    back = joined(pieces, {p.key: p.of(tensors) for p in pieces}, tensors)
    assert all(torch.equal(back[n], x) for n, x in tensors.items())
