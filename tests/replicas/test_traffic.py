"""Messages in few bits: what they cost, what is lost, and that it is sent later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.replicas import traffic
from tutti.replicas.traffic import CODINGS

CODED = pytest.mark.parametrize("coding", sorted(CODINGS))


def message(seed: int, scale: float = 1.0) -> traffic.Message:
    chance = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(40, 30, generator=chance) * scale,
        "b": torch.randn(7, generator=chance) * scale * 1e-3 + scale * 2e-3,
    }


def dtypes(x: traffic.Message) -> dict[str, torch.dtype]:
    return {n: v.dtype for n, v in x.items()}


@CODED
def test_what_was_sent_is_what_was_to_be_sent_less_the_last_error(coding: str) -> None:
    """After any number of rounds, so nothing is ever lost: the mean error falls as 1 / rounds."""
    state = traffic.no_error(coding, message(0))
    wanted = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in message(0).items()}
    arrived = {n: x.clone() for n, x in wanted.items()}
    for k in range(200):
        x = message(k, 1.0 + k % 3)
        errors, sent = traffic.encoded(coding, x, state)
        state |= errors
        for n, y in traffic.decoded(coding, sent, dtypes(x)).items():
            wanted[n] += x[n]
            arrived[n] += y
    for n, x in wanted.items():
        left = state[f"error.{n}"].double()
        assert 0 < left.abs().max() < 0.2
        torch.testing.assert_close(arrived[n] + left, x, rtol=0, atol=2e-4)


@CODED
def test_without_feedback_a_small_constant_beside_large_values_never_arrives(coding: str) -> None:
    """What the feedback is for: the same message again and again."""
    x = {"a": torch.tensor([1000.0, 1.0009765625, 1e-4])}
    state = traffic.no_error(coding, x)
    with_it, without = torch.zeros(3), torch.zeros(3)
    for _ in range(512):
        errors, sent = traffic.encoded(coding, x, state)
        with_it += traffic.decoded(coding, sent, dtypes(x))["a"] / 512
        _, alone = traffic.encoded(coding, x, traffic.no_error(coding, x))
        without += traffic.decoded(coding, alone, dtypes(x))["a"] / 512
        state |= errors
    relative = ((with_it - x["a"]) / x["a"]).abs()
    assert relative[:2].max() < 0.05
    assert ((without - x["a"]) / x["a"]).abs()[1] > relative[1]


@pytest.mark.parametrize(("coding", "nbytes"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_bytes_on_the_way(coding: str, nbytes: int) -> None:
    x = message(0)
    _, sent = traffic.encoded(coding, x, traffic.no_error(coding, x))
    steps = 4 * len(x) if coding == "int8" else 0
    assert (
        sum(v.nbytes for v in sent.values()) == nbytes * sum(v.numel() for v in x.values()) + steps
    )


def test_int8_clips_at_six_standard_deviations() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x[0] = 100.0
    deviation = x.square().mean().sqrt()
    parts = CODINGS["int8"].encode(x)
    back = CODINGS["int8"].decode(parts, torch.float32)
    assert back[0].item() == pytest.approx(6 * deviation.item(), rel=1e-5)
    assert (back[1:] - x[1:]).abs().max() <= 6 / 127 / 2 * deviation * 1.001


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=20),
    st.sampled_from(sorted(CODINGS)),
)
def test_any_finite_numbers_come_back_finite(values: list[float], coding: str) -> None:
    x = {"a": torch.tensor(values, dtype=torch.float32)}
    errors, sent = traffic.encoded(coding, x, traffic.no_error(coding, x))
    back = traffic.decoded(coding, sent, dtypes(x))["a"]
    assert back.shape == x["a"].shape and back.isfinite().all()
    torch.testing.assert_close(back + errors["error.a"], x["a"], rtol=1e-6, atol=0)


@CODED
def test_what_has_no_error_goes_as_it_is(coding: str) -> None:
    x = message(0) | {"statistics": torch.randn(5)}
    state = traffic.no_error(coding, message(0))
    errors, sent = traffic.encoded(coding, x, state)
    assert "error.statistics" not in errors and sent["statistics"] is x["statistics"]
    back = traffic.decoded(coding, sent, dtypes(x))
    assert torch.equal(back["statistics"], x["statistics"]) and back.keys() == x.keys()


def test_the_mean_of_half_types_is_taken_in_float32() -> None:
    parts = [{"a": torch.full((4,), 1.0, dtype=torch.bfloat16)} for _ in range(3)]
    parts[1]["a"] += 2**-7
    assert torch.equal(traffic.mean(parts)["a"], torch.full((4,), 1 + 2**-7 / 3).bfloat16())
