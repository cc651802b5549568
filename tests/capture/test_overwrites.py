"""A write becomes a new value where that is the same as `functionalize`'s way, and nowhere else."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zoo
from small_steps import step
from tutti.capture.second_trace import functional, overwrites
from tutti.capture.second_trace.overwrites import Overwrites
from tutti.capture.step import capture
from tutti.errors import CaptureError
from tutti.graph.text import text
from tutti.layout import Layout
from tutti.verification.verdict import Subject


class Writes(nn.Module):
    """Adds up what it reads around its writes; `kind` says which writes."""

    total: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)
        self.register_buffer("total", torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = getattr(self, self.kind)(x.abs() + 1)
        return self.linear(x * scale)

    def whole(self, a: Tensor) -> Tensor:
        same, before = a.detach(), a.sin()
        a.mul_(2.0)
        a.add_(before, alpha=3.0)
        return same + a.t().sum()

    def view_read_before(self, a: Tensor) -> Tensor:
        seen = a.t().sum(0)
        a.copy_(seen.expand_as(a))
        return a

    def view_read_after(self, a: Tensor) -> Tensor:
        turned = a.t()
        a.mul_(2.0)
        return a + turned

    def part(self, a: Tensor) -> Tensor:
        a[1:].mul_(2.0)
        return a

    def through_a_view(self, a: Tensor) -> Tensor:
        a.t().mul_(a.sum(1))
        return a

    def of_another_dtype(self, a: Tensor) -> Tensor:
        a.mul_(a.double().sin())
        return a

    def a_comparison(self, a: Tensor) -> Tensor:
        a.lt_(1.5)
        return a

    def by_an_op_of_another_name(self, a: Tensor) -> Tensor:
        a.pow_(2.0)
        return a

    def a_buffer(self, a: Tensor) -> Tensor:
        self.total.add_(a[:1])
        return self.total * 0.1

    def a_buffer_with_a_view(self, a: Tensor) -> Tensor:
        rows = self.total.view(-1)
        self.total.add_(a[:1])
        return rows[:6] * a

    def one_of_several_results(self, a: Tensor) -> Tensor:
        largest, where = a.max(0)
        largest.zero_()
        return a + largest + where

    def one_of_two_views(self, a: Tensor) -> Tensor:
        left, right = a.chunk(2)
        left.fill_(3.0)
        return a + right.sum()


# Whether all of their own writes become new values.
KINDS = {
    "whole": True,
    "view_read_before": True,
    "view_read_after": False,
    "part": False,
    "through_a_view": False,
    "of_another_dtype": False,
    "a_comparison": False,
    "by_an_op_of_another_name": False,
    "a_buffer": True,
    "a_buffer_with_a_view": False,
    "one_of_several_results": True,
    "one_of_two_views": False,
}


def case(kind: str) -> tuple[Any, nn.Module, Any, tuple[Tensor]]:
    torch.manual_seed(0)
    model = Writes(kind)
    return step, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), (torch.randn(6, 6),)


@cache
def found_in(kind: str) -> tuple[Subject, Overwrites]:
    """The step captured, and compared with the eager one, and the writes that became values."""
    seen: list[Overwrites] = []

    def noted(*args: Any) -> Overwrites:
        seen.append(overwrites.overwrites(*args))
        return seen[-1]

    with mock.patch.object(functional, "overwrites", noted):
        return Subject(*case(kind)), seen[0]


def replayed(built: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(functional, "copyable", lambda *args: set())
        patch.setattr(functional, "overwrites", lambda *args: Overwrites())
        return text(capture(*built).graph)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_that_of_functionalize(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, found = found_in(kind)
    assert text(subject.captured.graph) == replayed(case(kind), monkeypatch)
    own = [n for n in found.values if n.meta.get("region") == "forward"]
    assert bool(own) == KINDS[kind]
    assert any("sgd_" in str(n.target) for n in found.values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_the_eager_step(kind: str) -> None:
    found = found_in(kind)[0].verdict(Layout.parse("data=2"))
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["adafactor", "adamw_loop", "t5", "unet", "mlp_muon"])
def test_models_and_optimizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, model, optimizer, batches = zoo.CASES[name].build()
    made = text(capture(function, model, optimizer, batches[0]).graph)
    function, model, optimizer, batches = zoo.CASES[name].build()
    assert made == replayed((function, model, optimizer, batches[0]), monkeypatch)


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        ("_is_same", "view_read_after"),
        ("_is_same", "a_buffer_with_a_view"),
        ("_last_reads", "whole"),
    ],
)
def test_a_check_left_out_shows(check: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = replayed(case(kind), monkeypatch)
    without: dict[str, Any] = {
        "_is_same": lambda a, b: True,
        "_last_reads": lambda nodes: dict.fromkeys(nodes, -1),
    }
    monkeypatch.setattr(overwrites, check, without[check])
    try:
        wrong = text(capture(*case(kind)).graph)
    except CaptureError as error:  # shapes that do not fit, or an input without an end
        assert isinstance(error.__cause__, KeyError | RuntimeError)
        return
    assert wrong != right
