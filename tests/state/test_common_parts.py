"""Steps on models that have parts in common: each leaves the parts where the other has laid them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_steps
import tutti
from ranks import Ranks
from tutti.state.whole import model_state

LAYOUTS = ["data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipe=2", "pipe=2 micro=2"]
X = torch.linspace(-1, 1, 48).double().view(8, 6)
Steps = dict[str, Callable[[Tensor], Tensor]]


def parts() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double() for _ in range(2)]
    return made[0], made[1]


def evaluated(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for part in [model] if isinstance(model, nn.Module) else model:
            x = part(x)
        return x.square().mean()


def steps_of(layout: str, encoder: nn.Sequential, decoder: nn.Sequential) -> Steps:
    """A step on the whole, on each part, and evaluations, with an optimizer for each step that trains."""
    whole = nn.Sequential(encoder, decoder)

    def placed(prefix: str) -> dict[str, str] | None:
        return {f"{prefix}0.weight": "tensor, -"} if "tensor" in layout else None

    def trains(model: nn.Module, optimizer: Any, prefix: str) -> Any:
        given: Any = small_steps.step, model, optimizer, layout
        return tutti.distribute(*given, place=placed(prefix))

    return {
        "whole": trains(whole, torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9), "0."),
        "encoder": trains(encoder, torch.optim.Adam(encoder.parameters(), 0.01), ""),
        "decoder": trains(decoder, torch.optim.SGD(decoder.parameters(), 0.1), ""),
        "evaluate": tutti.distribute(evaluated, encoder, layout=layout),
        "evaluate both": tutti.distribute(evaluated, [encoder, decoder], layout=layout),
    }


ORDERS = {
    "the whole first": "whole, encoder, evaluate, whole, decoder, evaluate both, whole, encoder, whole",
    "a part first": "encoder, whole, encoder, evaluate both, whole, evaluate, decoder, whole",
    "evaluations first": "evaluate, evaluate both, whole, evaluate, decoder, encoder, evaluate both",
    "both parts first": "decoder, encoder, whole, decoder, evaluate, encoder, whole, evaluate both",
}


def taken_in(order: str, layout: str) -> list[Tensor]:
    encoder, decoder = parts()
    steps = steps_of(layout, encoder, decoder)
    found = [steps[name](X) for name in ORDERS[order].split(", ")]
    state = [*model_state(encoder).values(), *model_state(decoder).values()]
    return [x.detach().clone() for x in (*found, *state)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_in_turn_are_those_of_one_device(ranks: Ranks, order: str, layout: str) -> None:
    expected = taken_in(order, "")
    for found in ranks.run(taken_in, order, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def within_a_block(layout: str) -> str:
    """The error of the first call of a part's step, within a block of the whole; the block's end counts."""
    encoder, decoder = parts()
    steps = steps_of(layout, encoder, decoder)
    steps["evaluate both"](X)
    text = ""
    with tutti.whole([encoder, decoder]), torch.no_grad():
        try:
            steps["evaluate"](X)
        except tutti.TuttiError as error:
            text = str(error)
        encoder[0].weight.mul_(0.5)
    assert torch.equal(model_state(encoder)["0.weight"], parts()[0][0].weight * 0.5)
    steps["evaluate"](X)
    return text


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_a_first_call_within_a_block_of_the_whole_is_refused(ranks: Ranks, layout: str) -> None:
    for text in ranks.run(within_a_block, layout, n=2):
        assert "while its model's weights are whole" in text and "test_common_parts.py" in text


def under_another_layout(layout: str) -> str:
    encoder, decoder = parts()
    step = steps_of(layout, encoder, decoder)["decoder"]
    step(X)
    evaluate = tutti.distribute(evaluated, [encoder, decoder], layout="data=2")
    try:
        evaluate(X)
    except tutti.LayoutError as error:
        return str(error)
    return ""


def test_another_layout_for_a_part_in_shards_is_refused(ranks: Ranks) -> None:
    for text in ranks.run(under_another_layout, "data=2 zero=3", n=2):
        assert 'a part of this model is laid out as "data=2 zero=3" already, not "data=2"' in text
    assert ranks.run(under_another_layout, "data=2 zero=1", n=2) == ["", ""]
