"""`grouped_mm` of rows that a step sorts by their experts, as Hugging Face's mixtures do by default."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from captured_once import captured_once
from mixtures import NAMES, NUM_LAYERS, mixture, tokens, train_step
from ranks import Ranks
from tutti.capture.captured import Captured
from tutti.capture.step import capture
from tutti.errors import CaptureError
from tutti.graph.ops.expert_rows import expert_mm, expert_outer
from tutti.graph.ops.sorted_experts import sorted_experts
from tutti.layout import Layout
from tutti.verification.verdict import Subject

aten = torch.ops.aten
TOKENS, WIDTH, EXPERTS, TOP = 12, 8, 4, 2


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def calls(captured: Captured, target: Any) -> int:
    return len(captured.graph.find_nodes(op="call_function", target=target))


@cache
def subject(name: str) -> Subject:
    model = mixture(name, "grouped_mm")
    return Subject(train_step, model, sgd(model), (tokens(),))


@pytest.mark.parametrize("name", NAMES)
def test_models_of_hugging_face_in_their_default_form(name: str) -> None:
    """The products of rows with weights picked by an index (test_expert_products), in the first order."""
    captured = subject(name).captured
    assert calls(captured, expert_mm) == 4 * NUM_LAYERS[name]
    assert calls(captured, expert_outer) == 2 * NUM_LAYERS[name]
    assert not any(calls(captured, op) for op in (sorted_experts, aten.histc.default))
    assert all(
        node.args[1].op == "placeholder"
        for node in captured.graph.find_nodes(op="call_function", target=expert_mm)
    )


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "data=2 expert=2") for name in NAMES), (NAMES[0], "data=2")]
)
def test_verified(name: str, layout: str) -> None:
    """`Subject` compares the captured step with the eager one, and sorted rows in it."""
    verdict = subject(name).verdict(Layout.parse(layout))
    assert verdict.ok and verdict.max_error < 1e-9, str(verdict)


Group = tuple[Tensor, Tensor, Tensor]  # sorted rows, their order, ends of groups


class Experts(nn.Module):
    """Each token to its two best experts; `group` sorts rows, `undo` puts them back."""

    def __init__(self, **how: Callable[..., Any]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.how = {"group": by_expert, "between": torch.tanh, "undo": scattered} | how

    def forward(self, x: Tensor) -> Tensor:
        shares, experts = self.router(x).softmax(-1).topk(TOP, -1)
        kinds, order, ends = self.how["group"](experts.flatten())
        rows = F.grouped_mm(x[order // TOP], self.weight, offs=ends)  # group here
        rows = self.how["between"](rows + self.bias[kinds]) * shares.flatten()[order, None]
        return x + self.how["undo"](rows, order).view(-1, TOP, WIDTH).sum(1)


def by_expert(experts: Tensor) -> Group:
    kinds, order = experts.sort()
    return kinds, order, counted(kinds)


def counted(kinds: Tensor, low: int = 0) -> Tensor:
    counts = torch.histc(kinds.float(), EXPERTS, low, EXPERTS - 1)
    return counts.cumsum(0, dtype=torch.int32)


def stably(experts: Tensor) -> Group:
    kinds, order = torch.sort(experts, stable=True)
    return kinds, order, counted(kinds)


def scattered(rows: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(rows).index_put((order,), rows)


def inverted(rows: Tensor, order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return rows[inverse]


def beside_each_other(rows: Tensor) -> Tensor:
    """A dim more, by its number from the first, and one less."""
    return torch.stack([rows, rows.sin()], 2).select(-1, 1)


def in_pairs(rows: Tensor) -> Tensor:
    """Columns in turn, as GPT-OSS keeps gates and values."""
    return torch.stack([rows[:, ::2].sigmoid(), rows[:, 1::2]], -1).flatten(1)


def points_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def built(**how: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(**how)


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ({}, "data=2"),
        ({"group": stably}, "micro=2"),
        ({"undo": inverted}, "data=2 zero=3"),
        ({"between": in_pairs}, "data=2"),
        ({"between": beside_each_other}, "data=2"),
    ],
    ids=["put", "stable", "inverse", "in pairs", "beside"],
)
def test_own_code(how: Any, layout: str) -> None:
    model = built(**how)
    twin = copy.deepcopy(model)
    ours, theirs = sgd(model), sgd(twin)
    step = tutti.distribute(points_step, model, ours, "")
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH)
        torch.testing.assert_close(step(x), points_step(twin, theirs, x))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    verdict = tutti.verify(points_step, model, ours, (torch.randn(TOKENS, WIDTH),), layout)
    assert verdict.ok and verdict.max_error < 1e-9, str(verdict)


def descending(experts: Tensor) -> Group:
    kinds, order = experts.sort(descending=True)
    return kinds, order, counted(kinds)


def from_another_count(experts: Tensor) -> Group:
    kinds, order = experts.sort()
    return kinds, order, counted(kinds, -1)


def without_a_sum(experts: Tensor) -> Group:
    kinds, order = experts.sort()
    return kinds, order, torch.histc(kinds.float(), EXPERTS, 0, EXPERTS - 1).int()


def of_other_rows(experts: Tensor) -> Group:
    kinds, order = experts.sort()
    return kinds, order, counted((kinds + 1) % EXPERTS)


WRONG: dict[str, Any] = {
    "descending": {"group": descending},
    "another count": {"group": from_another_count},
    "no ends": {"group": without_a_sum},
    "other rows": {"group": of_other_rows},
    "a sum along the rows": {"between": lambda rows: rows.cumsum(0)},
    "the first rows only": {"between": lambda rows: F.pad(rows[:5], (0, 0, 0, len(rows) - 5))},
    "stacked over the rows": {"between": lambda rows: torch.stack([rows] * len(rows), -3)[:, 0]},
    "neighbors": {"between": lambda rows: rows.roll(1, 0)},
    "not put back": {"undo": lambda rows, order: rows},
    "put elsewhere": {"undo": lambda rows, order: scattered(rows, order.flip(0))},
    "over others": {
        "undo": lambda rows, order: torch.ones_like(rows).index_put((order,), rows, True)
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_other_uses_of_sorted_rows_are_refused(name: str) -> None:
    """Each would be another step without the sort."""
    model = built(**WRONG[name])
    with pytest.raises(CaptureError, match="multiplies groups of rows") as error:
        capture(points_step, model, sgd(model), (torch.randn(TOKENS, WIDTH),))
    assert "group here" in str(error.value)


def test_sorted_rows_that_the_step_returns_are_refused() -> None:
    model = built()

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        kinds, order, ends = by_expert(model.router(x).argmax(-1))
        rows = F.grouped_mm(x[order], model.weight, offs=ends)  # group here
        return points_step(model, optimizer, x), kinds, rows.detach()

    with pytest.raises(CaptureError, match="multiplies groups of rows"):
        capture(step, model, sgd(model), (torch.randn(TOKENS, WIDTH),))


def losses(layout: str | None) -> list[float]:
    """Of three steps of a Mixtral as it comes; plain PyTorch without a layout."""
    model = mixture("Mixtral", "grouped_mm")
    optimizer = sgd(model)
    step: Any = partial(train_step, model, optimizer)
    if layout is not None:
        step = tutti.distribute(train_step, model, optimizer, layout)
    with captured_once("grouped Mixtral"):
        return [float(step(tokens(k))) for k in range(3)]


@pytest.mark.parametrize("layout", ["data=2 zero=3", "expert=2"])
def test_ranks_train_as_plain_pytorch(layout: str, ranks: Ranks) -> None:
    want = ranks.after(losses, None).result
    for have in ranks.after(losses, "").run(losses, layout, n=2):
        assert have == pytest.approx(want, rel=1e-5)
