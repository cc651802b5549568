"""Batches and results whose parts refer back to the whole, as the data of PyTorch Geometric does."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.capture.batch import taken
from tutti.capture.forms import flattened
from tutti.errors import CaptureError
from tutti.torch_private.pytrees import tree_unflatten


class Storage:
    """A part of a graph: it has no use without the graph."""

    def __init__(self, graph: Graph, **values: Any) -> None:
        self.parent = weakref.ref(graph)
        self.values = values

    def value(self, name: str) -> Any:
        graph = self.parent()
        assert graph is not None
        return graph.scale * self.values[name]


class Rest:
    """A part without tensors and without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, graph: Graph) -> None:
        self.parent = weakref.ref(graph)
        self.sizes = {"nodes": [8, 3]}


class Graph:
    """Nodes, edges by type, and itself; no hash, as all that compares its contents."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, **values: Any) -> None:
        self.scale = 2
        self.store = Storage(self, **values)
        self.edges = {"to": Storage(self, at=torch.tensor([[0, 1, 2], [1, 2, 3]]))}
        self.views = [self.store, Storage(self)]
        self.whole = self
        self.own = weakref.ref(self)
        self.rest = Rest(self)


def graph(seed: int) -> Graph:
    made = torch.Generator().manual_seed(seed)
    return Graph(x=torch.randn(8, 4, generator=made), y=torch.randn(8, 3, generator=made))


def flows(model: Any, optimizer: Any, data: Graph) -> tuple[Tensor, Graph]:
    assert data.store.parent() is data and data.whole is data and data.own() is data
    near, far = data.edges["to"].values["at"]
    h = model(data.store.value("x"))
    h = h.index_add(0, far, h[near])
    loss = F.mse_loss(h, data.views[0].values["y"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, Graph(x=h.detach(), y=loss.detach())


def program() -> Program:
    model = nn.Linear(4, 3)
    return flows, model, torch.optim.Adam(model.parameters(), lr=0.1), (graph(1),)


def test_steps_take_and_return_them() -> None:
    assert_as_eager(program)


def test_ranks_split_them(ranks: Ranks) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3")


def test_the_rebuilt_whole_is_what_its_parts_refer_to() -> None:
    given = graph(2)
    leaves, form = flattened(given)
    assert sum(isinstance(x, Tensor) for x in leaves) == 5  # `store` stands in two places
    again = flattened(graph(3))
    assert again[1] == form
    made = tree_unflatten([-x if isinstance(x, Tensor) else x for x in leaves], form)
    for part in (made.store, made.edges["to"], made.rest, *made.views):
        assert part.parent() is made
    assert made.rest.sizes == {"nodes": [8, 3]}
    assert made is not given and made.whole is made and made.own() is made
    assert given.store.parent() is given and given.whole is given
    torch.testing.assert_close(made.store.value("x"), -given.store.value("x"))


class Node:
    """It has a hash, and refers to its parent."""

    def __init__(self, parent: Node | None, value: Tensor | None) -> None:
        self.parent = None if parent is None else weakref.ref(parent)
        self.value = value
        self.child: Node | None = None


@pytest.mark.parametrize("other", [graph(5), Node(None, torch.ones(2))], ids=["unhashable", "hash"])
def test_a_reference_to_something_else_is_refused(other: Any) -> None:
    given = graph(4)
    given.store.parent = weakref.ref(other)
    with pytest.raises(
        CaptureError, match=r"holds a (weakref\.)?Ref\w+[\s\S]*step\(data.x, data.y\)"
    ):
        taken((given,))


def test_a_chain_of_references_is_refused() -> None:
    first = Node(None, torch.ones(2))
    first.child = Node(first, torch.ones(2))
    first.child.child = Node(first.child, torch.ones(2))
    with pytest.raises(CaptureError, match="it refers to tensors"):
        taken((first,))
