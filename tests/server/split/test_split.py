"""Worker part, coupling and updates on blocks are the captured step, in float64, for many optimizers."""

from __future__ import annotations

import pytest

from server.split.steps import CASES, Servers, captured, difference, run, start
from tutti.server.split.three_parts import split
from tutti.server.split.worker_part import alone, together

STEPS = 2


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_the_step(name: str) -> None:
    found, feed = captured(name)
    made = split(found)
    parts = {"alone": alone(made), "together": together(made)}
    whole = start(found)
    mine = {mode: start(found) for mode in parts}
    servers = {mode: Servers(made, start(found)) for mode in parts}
    assert all(o.variable.divisible for o in made.owned) == CASES[name][2]
    for k in range(STEPS):
        feed["optim.0.lr"] = 0.1 / (k + 1)
        returned, whole = run(found, whole, feed, k)
        for mode, part in parts.items():
            out, mine[mode] = run(part.captured, mine[mode], feed, k)
            own, gradients, numbers = part.parts(out)
            scalars = {**feed, **numbers}
            if mode == "together":
                scalars = servers[mode].scalars(gradients, scalars)
            servers[mode].update(gradients, scalars)
            mine[mode] |= servers[mode].state()
            leaves = part.result(own, scalars, wide=True)
            assert max(map(difference, leaves, returned)) < 1e-12
            assert max(difference(mine[mode][n], whole[n]) for n in whole) < 1e-12
