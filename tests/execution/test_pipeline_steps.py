"""Steps of pipelines on ranks: what they return, what they say, and how they fail."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import small_steps
import tutti
from execution import pipelines
from ranks import Ranks

SOURCE = Path(pipelines.__file__).read_text().splitlines()
SPOILED = 1 + next(i for i, line in enumerate(SOURCE) if "# spoiled here" in line)


def message_of(layout: str, where: int) -> str:
    """The error of a checked step on a batch of which one row spoils; "" without."""
    x, y = pipelines.data()
    x[where, 0] = 1000.0
    step = pipelines.distributed(layout, spoiled=True)
    first: Any = step.model.get_submodule("0")
    first.weight.data.copy_(torch.eye(16))  # what is large stays so
    with mock.patch.dict(os.environ, {"TUTTI_CHECK_NAN": "1"}):
        try:
            step(x, y)
        except tutti.TuttiError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("where", "micro"), [(2, 0), (13, 3)])
def test_a_check_looks_into_a_loop(where: int, micro: int) -> None:
    found = message_of("micro=4", where)
    assert "div.Tensor made NaN or infinity of finite values at step 0" in found
    assert f"pipelines.py:{SPOILED}" in found and f"module 2, micro-batch {micro} of 4);" in found
    assert "stage" not in found


def checked_step(layout: str) -> list[float]:
    """The losses of checked steps on good data."""
    step = pipelines.distributed(layout)
    with mock.patch.dict(os.environ, {"TUTTI_CHECK_NAN": "1"}):
        return [step(*pipelines.data()).item() for _ in range(2)]


def plain_step(layout: str, cut: tuple[str, ...] = ()) -> list[float]:
    step = pipelines.distributed(layout, cut=cut)
    return [step(*pipelines.data()).item() for _ in range(2)]


def test_a_checked_pipeline_takes_the_same_steps(ranks: Ranks) -> None:
    expected = plain_step("")
    for losses in ranks.run(checked_step, "pipe=2 micro=4", n=2):
        assert losses == pytest.approx(expected, rel=1e-10)


def what_stage_has(cut: tuple[str, ...]) -> tuple[list[float], list[str]]:
    """The losses, and the parameters that lie on this rank."""
    step = pipelines.distributed("pipe=2 micro=2", cut=cut)
    losses = [step(*pipelines.data()).item() for _ in range(2)]
    return losses, sorted(n for n in step.state_dict() if n != "num_steps")


@pytest.mark.parametrize(("cut", "first"), [(("2",), [0]), (("3",), [0, 2]), (("[3-9]",), [0, 2])])
def test_cut_names_where_a_stage_begins(
    ranks: Ranks, cut: tuple[str, ...], first: list[int]
) -> None:
    expected = plain_step("", cut)  # one device has nothing to cut
    here, there = ranks.run(what_stage_has, cut, n=2)
    assert here[0] == pytest.approx(expected, rel=1e-10)
    assert here[1] == sorted(f"{i}.{x}" for i in first for x in ("weight", "bias"))
    assert len(here[1]) + len(there[1]) == 6 and not set(here[1]) & set(there[1])


def numbers_of_losses(layout: str) -> list[float]:
    """The results of a step that computes with its loss as a number, in its backward and after it."""
    kept = {"average": 0.0}

    def train_step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scale = 1 + 2 * loss.item()
        (loss / scale).backward()
        optimizer.step()
        kept["average"] = 0.9 * kept["average"] + 0.1 * loss.item()
        return {"loss": loss.detach(), "scale": scale, "average": kept["average"]}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer, layout)
    x = torch.randn(8, 6, dtype=torch.float64)
    return [float(value) for _ in range(3) for value in step(x).values()]


def test_numbers_of_a_loss_are_known_on_all_ranks(ranks: Ranks) -> None:
    expected = numbers_of_losses("")
    for found in ranks.run(numbers_of_losses, "pipe=2", n=2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_verify_takes_cut() -> None:
    model = pipelines.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for cut in ("2", ["3"]):
        assert tutti.verify(
            pipelines.train_step, model, optimizer, pipelines.data(), "pipe=2 micro=2", cut=cut
        ).ok
    with pytest.raises(tutti.LayoutError, match=r'cut="22" names no module[\s\S]*such as 2'):
        tutti.verify(pipelines.train_step, model, optimizer, pipelines.data(), "pipe=2", cut="22")
    with pytest.raises(tutti.LayoutError, match="2 names for 2 stages"):
        tutti.verify(
            pipelines.train_step, model, optimizer, pipelines.data(), "pipe=2", cut=("2", "3")
        )


def other_cuts() -> str:
    """Ranks that cut at different modules; the error."""
    try:
        plain_step("pipe=2 micro=2", ("2",) if dist.get_rank() else ("3",))
    except tutti.CommError as error:
        return str(error)
    return ""


def test_ranks_that_cut_otherwise_are_told_before_the_first_step(ranks: Ranks) -> None:
    for text in ranks.run(other_cuts, n=2):
        assert re.search(
            r"ranks would run different.*\n.*rank 0: pipeline rank 0 .*\n.*rank 1: pipeline rank 0 ",
            text,
        ), text


class ManyHeads(nn.Module):
    """Twelve values cross from the first half to the second, and as many gradients back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(12))
        self.tails = nn.ModuleList(nn.Linear(4, 1) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        found = [head(self.first(x)).tanh() for head in self.heads]
        return torch.cat([tail(h) for tail, h in zip(self.tails, found, strict=True)], 1)


def losses_of_many_heads(layout: str) -> list[float]:
    torch.manual_seed(0)
    model = ManyHeads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = ("tails.0",) if "pipe" in layout else ()
    step = tutti.distribute(small_steps.step, model, optimizer, layout, cut=cut)
    x = torch.randn(8, 6, dtype=torch.float64)
    return [step(x).item() for _ in range(3)]


@pytest.mark.parametrize("layout", ["pipe=2 micro=4", "pipe=2 micro=4 schedule=zb"])
def test_a_message_of_more_values_than_a_channel_has_slots(ranks: Ranks, layout: str) -> None:
    expected = losses_of_many_heads("")
    for found in ranks.run(losses_of_many_heads, layout, n=2):
        assert found == pytest.approx(expected, rel=1e-12)
