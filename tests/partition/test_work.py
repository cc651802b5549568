"""Repeated layers are worked out once: the work of making a program does not grow with their number."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import zoo
import zoo_models
from tutti.capture.captured import Captured, copied
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.partition import choose
from tutti.partition.partition import partition
from tutti.partition.reshard import route
from tutti.propagate import spread
from tutti.propagate.plan import plan
from tutti.rules import book
from zoo_steps import plain_step, token_batch

LAYOUT = Layout.parse("data=2 tensor=2 zero=3")


@cache
def captured(num_layers: int) -> Captured:
    torch.manual_seed(0)
    model = zoo_models.GPT(num_layers=num_layers)
    return capture(plain_step, model, zoo.adamw(model), token_batch(0))


@pytest.fixture(scope="module")
def work() -> dict[int, Counter[str]]:
    """By number of layers, how often each kind of work was done to make a program."""
    return {num_layers: counted(captured(num_layers)) for num_layers in (3, 6)}


def counted(given: Captured) -> Counter[str]:
    count: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((book, "rule_of"), (spread, "_proposal"), (choose, "choose")):
            patch.setattr(module, name, _counting(getattr(module, name), name, count))
        route.cache_clear()
        made = plan(copied(given), LAYOUT, zoo.PLACE_GPT)
        program = partition(made)
    count["route"] = route.cache_info().misses
    count["collectives"] = len(program.collectives)
    return count


def _counting(function: Any, name: str, count: Counter[str]) -> Any:
    def counts(*args: Any) -> Any:
        count[name] += 1
        return function(*args)

    return counts


@pytest.mark.parametrize("kind", ["rule_of", "_proposal", "choose", "route"])
def test_twice_the_layers_are_no_more_work(work: dict[int, Counter[str]], kind: str) -> None:
    assert work[6]["collectives"] > 1.7 * work[3]["collectives"]
    assert 0 < work[6][kind] == work[3][kind]


def test_an_op_is_visited_again_only_when_something_around_it_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a run of the spread, and once more a change: linear in the layers."""
    visits: Counter[int] = Counter()
    visit = spread.Spread._visit
    for num_layers in (3, 6):
        given = captured(num_layers)

        def counts(self: Any, node: Any, rule: Any, num_layers: int = num_layers) -> bool:
            visits[num_layers] += 1
            return visit(self, node, rule)

        monkeypatch.setattr(spread.Spread, "_visit", counts)
        plan(copied(given), LAYOUT, zoo.PLACE_GPT)
    assert 0 < visits[6] <= 2 * visits[3]
