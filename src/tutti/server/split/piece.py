"""Extracts a subgraph of a captured graph: some values of the whole as inputs, some as outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import value_of
from tutti.graph.edits.promote import promoted

aten = torch.ops.aten
# Converts a placeholder of a piece to the value of the whole graph: (graph, placeholder, the value).
Adapt = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


@dataclass(frozen=True)
class GraphPiece:
    """A graph with named inputs and outputs; its constants are those of `owner`."""

    graph: fx.Graph
    owner: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def function(self) -> Callable[..., list[Any]]:
        """The graph as a Python function of its inputs, in order."""
        return fx.GraphModule(self.owner, self.graph).forward

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name, from inputs by name."""
        with torch.no_grad():
            values = self.function(*(given[n] for n in self.inputs))
        return dict(zip(self.outputs, values, strict=True))

    def promoted(self) -> GraphPiece:
        """The same in float64 throughout."""
        graph, owner, _ = promoted(self.graph, self.owner)
        return GraphPiece(graph, owner, self.inputs, self.outputs)


@dataclass(frozen=True)
class Cut:
    """Copies pieces out of one graph.

    inputs: the values of the whole that are inputs of pieces, and their names.
    adapt: conversions of some of them at the input.
    """

    owner: nn.Module
    inputs: Mapping[fx.Node, str]
    adapt: Mapping[fx.Node, Adapt] = field(default_factory=dict)

    def piece(self, outputs: Mapping[str, fx.Node]) -> GraphPiece:
        """The piece that computes `outputs`, with the needed ones of `inputs`."""
        needed = self.ancestors(outputs.values())
        graph, mapped = fx.Graph(), dict[fx.Node, fx.Node]()
        given = [x for x in self.inputs if x in needed]
        for x in given:
            mapped[x] = graph.placeholder(
                "".join(c if c.isalnum() else "_" for c in self.inputs[x])
            )
            mapped[x].meta = {"val": x.meta["val"], "name": self.inputs[x]}
        for x in given:
            if x in self.adapt:
                mapped[x] = self.adapt[x](graph, mapped[x], x)
        for node in needed:
            if node not in mapped:
                mapped[node] = graph.node_copy(node, mapped.__getitem__)
        graph.output([mapped[x] for x in outputs.values()])
        return GraphPiece(graph, self.owner, tuple(self.inputs[x] for x in given), tuple(outputs))

    def ancestors(self, starts: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """`starts` and all their ancestors up to the inputs, in the order of the graph."""
        found = ancestors(starts, given=self.inputs)
        nodes = next(iter(found)).graph.nodes if found else ()
        return dict.fromkeys(n for n in nodes if n in found)


def emitted(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the end of `graph`, with its fake value."""
    node = graph.call_function(target, args, kwargs)
    with torch.no_grad():
        node.meta["val"] = target(*value_of(args), **value_of(kwargs))
    return node


def from_number(graph: fx.Graph, number: fx.Node, like: fx.Node) -> fx.Node:
    """A number as a tensor of one element, its form in the whole graph."""
    val = like.meta["val"]
    if not isinstance(val, Tensor):
        return number
    number.meta["val"] = 0.0
    made = graph.call_function(
        aten.full.default, (list(val.shape), number), {"dtype": val.dtype, "device": val.device}
    )
    made.meta = {"val": val}
    return made


def names_of_numbers(name: str, like: Any) -> list[str]:
    """The names of the numbers in which a value travels: its own, or for several one for each place."""
    if not isinstance(like, Tensor) or like.numel() == 1:
        return [name]
    return [f"{name}.{k}" for k in range(like.numel())]


def numbers_of(name: str, x: Any) -> dict[str, float]:
    """A value as numbers by name."""
    values = x.flatten().tolist() if isinstance(x, Tensor) else [x]
    return dict(zip(names_of_numbers(name, x), map(float, values), strict=True))


def of_numbers(
    name: str, numbers: Mapping[str, float], like: Any, dtype: torch.dtype | None = None
) -> Any:
    """The value of `numbers_of`, in the form of `like`; a tensor as `dtype`, if given."""
    values = [numbers[n] for n in names_of_numbers(name, like)]
    if not isinstance(like, Tensor):
        return values[0]
    made = torch.tensor(values, dtype=torch.float64)
    return made.to(like.device, dtype or like.dtype).reshape(like.shape)
