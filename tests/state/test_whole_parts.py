"""Blocks of whole weights around what is not the model of a step: its parts, its wrappers, dicts, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.state.whole import model_state

LAYOUTS = ["data=2", "data=2 zero=3", "pipe=2", "pipe=2 micro=2"]
X = torch.linspace(-1, 1, 24).double().view(4, 6)


@dataclass
class Run:
    """An encoder and a decoder as one model, each with an optimizer of its own, after two steps."""

    step: tutti.Step
    model: Any
    encoder: nn.Module
    decoder: nn.Module
    optimizers: list[torch.optim.Optimizer]


def started(layout: str, around: Callable[..., Any]) -> Run:
    """A run of the model that `around` makes of both parts."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double() for _ in range(2)]
    order = [0, 1]
    if dist.is_initialized() and dist.get_rank():
        order.reverse()  # a set of optimizers then has another order than on rank 0
    made = {k: torch.optim.Adam(parts[k].parameters(), lr=0.01) for k in order}
    optimizers = [made[0], made[1]]

    def train_step(model: Any, optimizers: Any, x: Tensor) -> Tensor:
        loss = F.mse_loss(parts[1](parts[0](x)), x)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    model = around(*parts)
    step = tutti.distribute(train_step, model, optimizers, layout)
    for _ in range(2):
        step(X)
    return Run(step, model, parts[0], parts[1], optimizers)


def as_dict(encoder: nn.Module, decoder: nn.Module) -> dict[str, nn.Module]:
    return {"encoder": encoder, "decoder": decoder}


def slots_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [x.detach().clone() for slots in state.values() for x in slots.values()]


def a_part(layout: str) -> list[Tensor]:
    """One part evaluated, then changed."""
    run = started(layout, nn.Sequential)
    with tutti.whole(run.encoder), torch.no_grad():
        found = [run.encoder(X)]
        run.encoder[2].weight.mul_(0.5)  # type: ignore[index, union-attr]
    return [*found, run.step(X), *model_state(run.encoder).values()]


def a_dict(layout: str) -> list[Tensor]:
    """A dict of models: in a block of all of it, and each in a block within another's."""
    run = started(layout, as_dict)
    with tutti.whole(run.model), torch.no_grad():
        found = [run.decoder(run.encoder(X))]
    with tutti.whole(run.encoder), torch.no_grad():
        run.encoder[0].bias.add_(1.0)  # type: ignore[index, union-attr]
        with tutti.whole(run.decoder):
            found.append(run.decoder(run.encoder(X)))
            run.decoder[0].bias.sub_(1.0)  # type: ignore[index, union-attr]
        found.append(run.encoder(X))
    state = model_state(run.model)
    assert next(iter(state)) == "encoder.0.weight"
    return [*found, run.step(X), *state.values()]


def wrappers(layout: str) -> list[Tensor]:
    """A compiled model, and a module that has it beside others."""
    run = started(layout, lambda *parts: torch.compile(nn.Sequential(*parts), backend="eager"))
    holder = nn.ModuleDict({"net": run.model, "other": nn.Linear(6, 6).double()})
    with tutti.whole(run.model), torch.no_grad():
        found = [run.model(X)]
    with tutti.whole(holder), torch.no_grad():
        found.append(holder["net"](X))
        run.decoder[2].bias.mul_(2.0)  # type: ignore[index, union-attr]
    return [*found, run.step(X), *model_state(run.model).values()]


def several_optimizers(layout: str) -> list[Tensor]:
    """The slots of both optimizers, of one part's, and within a block of weights."""
    run = started(layout, nn.Sequential)
    with run.step.whole(slots=True):
        found = [x for one in run.optimizers for x in slots_of(one)]
    with tutti.whole(run.decoder, slots=True):
        found += slots_of(run.optimizers[1])
    with run.step.whole(), torch.no_grad():
        run.encoder[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
        with run.step.whole(slots=True):
            found += slots_of(run.optimizers[0])
            for slots in run.optimizers[0].state.values():
                slots["exp_avg"].mul_(0.5)
    return [*found, run.step(X), run.step(X)]


def copies(layout: str) -> list[Tensor]:
    """A copy made of shards: updated part by part, then evaluated and changed in a block."""
    run = started(layout, nn.Sequential)
    average = copy.deepcopy(run.model)
    for _ in range(2):
        run.step(X)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), run.model.parameters(), strict=True):
                mean.lerp_(p, 0.5)
    with tutti.whole(average), torch.no_grad():
        found = [average(X)]
        average[0][0].weight.mul_(2.0)
    with tutti.whole(average), tutti.whole(run.model), torch.no_grad():
        found += [average(X), run.model(X)]
    return [*found, *model_state(average).values(), *model_state(run.model).values()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [a_part, a_dict, wrappers, several_optimizers, copies])
def test_weights_in_blocks_are_those_of_one_device(
    ranks: Ranks, program: Callable[[str], list[Tensor]], layout: str
) -> None:
    expected = [x.detach().clone() for x in program("")]
    for found in ranks.run(program, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.detach(), y, rtol=1e-10, atol=1e-12)


def within_one_rank(layout: str) -> list[str]:
    """Blocks of more tensors inside that of one rank, and a failure of the second of two models."""
    run = started(layout, nn.Sequential)
    said = []
    for block in (
        lambda: tutti.whole(run.model, slots=True),
        lambda: tutti.whole(run.model),
        lambda: tutti.whole(run.model, rank=1),
    ):
        try:
            with tutti.whole(run.encoder, rank=0), block():
                said.append("")
        except tutti.TuttiError as error:
            said.append(str(error))
    run.step(X)  # all shards are back in their places
    with run.step.whole():
        run.decoder(run.encoder(X))
    return said


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_a_block_of_more_within_that_of_one_rank_is_refused_on_all(
    ranks: Ranks, layout: str
) -> None:
    first, second = ranks.run(within_one_rank, layout, n=2)
    assert all("opened within one of rank 0 alone" in text for text in first)
    assert all("test_whole_parts.py" in text for text in (*first, *second))
    assert all("weights are whole" in text for text in second)
