"""Small programs written by hand, and their text: what golden tests of passes compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tutti.graph.ops import collectives
from tutti.graph.text import text
from tutti.passes.target import Target

SHARED = Target(donated=frozenset({"w"}), shared=frozenset({("data",)}))
APART = Target(donated=frozenset({"w"}))


class Builder:
    """Adds nodes with values, as partition does."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, name: str, *shape: int, kind: str = "parameter") -> fx.Node:
        """An input."""
        node = self.graph.placeholder(name)
        node.meta = {"val": torch.empty(shape, device="cpu"), "name": name, "kind": kind}
        return node

    def call(self, target: Callable[..., Any], *args: Any, shape: Sequence[int] = ()) -> fx.Node:
        """A call with a result of `shape`; that of the first operand by default."""
        node = self.graph.call_function(target, args)
        node.meta = {"val": torch.empty(shape or args[0].meta["val"].shape)}
        return node

    def done(self, returned: list[Any], updates: list[fx.Node]) -> fx.Graph:
        """The graph with its output."""
        self.graph.output((returned, updates))
        self.graph.lint()
        return self.graph


@dataclasses.dataclass
class Named:
    """As much of a `Program` as passes look at."""

    updated: list[str]

    @property
    def captured(self) -> Named:
        """The names of the state that the program updates, where a program has them."""
        return self


def lines(graph: fx.Graph) -> list[str]:
    """The text of each node without its type; inputs left out."""
    every = [line.partition(" = ")[2].strip() for line in text(graph).splitlines()]
    return [line for line in every if line not in ("", "input()")]


def targets(graph: fx.Graph) -> list[str]:
    """The names of the collectives of a graph, in order."""
    played = [n for n in graph.nodes if n.target in collectives.PLAYED]
    return [n.target.__name__ for n in played]
