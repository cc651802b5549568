"""Gradients in fewer bytes: what arrives, in all, and what it costs."""

from __future__ import annotations

import pytest
import torch

from server.protocol.updaters import LR, Sgd, whole_state
from server.wire.running import client, like, services
from tutti.errors import ServerError
from tutti.server.protocol.feedback import Feedback
from tutti.server.protocol.update import WEIGHT

COMPRESSED = pytest.mark.parametrize(("compression", "nbytes"), [("bf16", 2), ("int8", 1)])


@COMPRESSED
def test_what_was_pushed_is_what_was_to_be_pushed_less_the_last_error(
    compression: str, nbytes: int
) -> None:
    feedback, chance = Feedback(compression), torch.Generator().manual_seed(0)
    wanted, arrived = torch.zeros(300), torch.zeros(300)
    for _ in range(100):
        x = torch.randn(300, generator=chance)
        part = feedback.part(3, x)
        assert part.values.nbytes == nbytes * 300
        wanted, arrived = wanted + x, arrived + part.plain(torch.float32)
    left = feedback._errors[3]
    assert 0 < left.abs().max() < 0.2
    torch.testing.assert_close(arrived + left, wanted, rtol=0, atol=2e-4)


def test_whole_numbers_and_fp32_go_as_they_are() -> None:
    x, count = torch.randn(5), torch.arange(5)
    assert Feedback("fp32").part(0, x).values is x
    assert Feedback("int8").part(0, count).values is count
    with pytest.raises(ServerError, match="fp16"):
        Feedback("fp16")


@COMPRESSED
def test_a_server_gets_the_same_step_up_to_the_last_error(compression: str, nbytes: int) -> None:
    """The same gradient again and again: without feedback int8 would miss the small numbers for good."""
    updater, state = Sgd(), whole_state(Sgd())
    made = {n: torch.randn_like(s[WEIGHT]) * 1e-3 for n, s in state.items()}
    for x in made.values():
        x.view(-1)[0] = 1.0
    with (
        services(updater, "async", 1) as running,
        client(updater, "async", [running[0].address], 0, traffic=compression) as one,
    ):
        one.join()
        seen = like(updater)
        for _ in range(64):
            one.pull(seen)
            one.push(made, {"lr": LR})
        one.pull(seen)
    for n, x in seen.items():
        moved = (state[n][WEIGHT] - x) / (LR * 64)
        torch.testing.assert_close(moved, made[n], rtol=1e-3, atol=1e-3)
        assert (moved - made[n]).abs().mean() < 1e-3 / 4
