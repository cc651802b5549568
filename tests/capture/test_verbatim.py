"""A node is taken over from the first trace only where replaying it would give the same node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
import zoo
from small_steps import step
from tutti.capture.captured import Captured
from tutti.capture.second_trace import functional, overwrites, sharing, verbatim
from tutti.capture.second_trace.overwrites import Overwrites
from tutti.capture.step import capture
from tutti.graph.text import text


class Overwriting(nn.Module):
    """Writes into values, through views of them, and into a buffer; before and after they are read."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs() + 1  # written below, through a view of a view
            before = scale.sum()
            scale.view(-1)[3:].mul_(0.5)
            left, right = scale.chunk(2)
            left.add_(right)
            read = self.count.view(2, 4)  # a view of what is written below
            early = read.exp()
            self.count.add_(scale.mean())
        return self.linear(x * scale) * (before + early.sum() + read.sum())


def overwriting() -> tuple[Any, nn.Module, Any, tuple[Tensor]]:
    torch.manual_seed(0)
    model = Overwriting()
    return step, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), (torch.randn(4, 8),)


def case(name: str) -> tuple[Any, nn.Module, Any, Any]:
    if name == "overwriting":
        return overwriting()
    function, model, optimizer, batches = zoo.CASES[name].build()
    return function, model, optimizer, batches[0]


CASES = ("overwriting", "resnet", "checkpoint", "accumulate")


def captured(name: str) -> Captured:
    return capture(*case(name))


@pytest.mark.parametrize("name", CASES)
def test_copied_and_replayed_nodes_give_one_graph(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def counted(*args: Any) -> set[Any]:
        found = verbatim.copyable(*args)
        taken.append(len(found))
        return found

    monkeypatch.setattr(functional, "copyable", counted)
    copied = captured(name)
    monkeypatch.setattr(functional, "copyable", lambda *args: set())
    monkeypatch.setattr(functional, "overwrites", lambda *args: Overwrites())
    replayed = captured(name)
    assert text(copied.graph) == text(replayed.graph)
    assert taken[0] > 0
    for mine, other in zip(copied.graph.nodes, replayed.graph.nodes, strict=True):
        assert {k: mine.meta.get(k) for k in ("source", "module", "region")} == {
            k: other.meta.get(k) for k in ("source", "module", "region")
        }


def test_the_step_that_overwrites_is_the_eager_step() -> None:
    function, model, optimizer, batch = overwriting()
    found = tutti.verify(function, model, optimizer, batch, "data=2")
    assert found.ok, str(found)


@pytest.mark.parametrize("hidden", ["written", "_aliased"])
def test_a_write_that_is_not_seen_shows(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step above tells a right analysis from one that misses writes, or what shares memory."""
    right = text(captured("overwriting").graph)
    for module in (sharing, verbatim, overwrites):
        monkeypatch.setattr(module, hidden, lambda *args: iter(()), raising=False)
    monkeypatch.setattr(sharing, "_storages", lambda val: iter(()))
    assert text(captured("overwriting").graph) != right


def test_most_of_forward_and_backward_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def counted(graph: Any, *args: Any) -> set[Any]:
        found = verbatim.copyable(graph, *args)
        both = [n for n in graph.nodes if n.meta.get("region") in ("forward", "backward")]
        shares.append(sum(n in found for n in both) / len(both))
        return found

    monkeypatch.setattr(functional, "copyable", counted)
    captured("llama")
    assert shares[0] > 0.6
