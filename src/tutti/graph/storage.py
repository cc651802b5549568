"""Which memory each value of a graph lies in: found by running the graph on fake tensors.

A fake run makes what a real one makes: views share memory, a reshape of permuted values copies, an
in-place op writes where its operand lies, one op may make several tensors. So there is no list of ops here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from tutti.graph import collectives
from tutti.graph.draw import draw

# Worked out when the code is written: a constant of it.
_CONSTANTS = (collectives.positions,)
# What has no kernel to be run on fake tensors: it makes new, contiguous memory.
_NAMES = frozenset({*collectives.PLAYED, draw})


@dataclass(frozen=True, eq=False)
class Block:
    """A piece of memory, made by `node`, `nbytes` long; views and in-place results lie in it too."""

    node: fx.Node
    nbytes: int


class Storages:
    """The blocks behind each node of `graph`; one for a tensor, one a result for several results.

    Inputs and constants have blocks too; what they hold lives longer than the graph.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.of: dict[fx.Node, tuple[Block, ...]] = {}
        self.fakes: dict[fx.Node, Any] = {}
        known: dict[int, Block] = {}
        with mode, torch.no_grad():
            for node in graph.nodes:
                if node.op == "output":
                    continue
                value = self.fakes[node] = self._value(node)
                blocks: dict[Block, None] = {}
                for x in tree_leaves(value):
                    if isinstance(x, Tensor):
                        memory = x.untyped_storage()
                        block = known.get(memory._cdata) or Block(node, memory.nbytes())
                        blocks[known.setdefault(memory._cdata, block)] = None
                self.of[node] = tuple(blocks)

    @staticmethod
    def is_given(block: Block) -> bool:
        """Whether the block is there before the call and after it: an input or a constant."""
        return block.node.op != "call_function" or block.node.target in _CONSTANTS

    def given(self) -> list[Block]:
        """The blocks of inputs and constants."""
        found = dict.fromkeys(b for blocks in self.of.values() for b in blocks)
        return [b for b in found if self.is_given(b)]

    def made(self, node: fx.Node) -> Iterator[Block]:
        """The blocks that are new at `node` when it runs."""
        found = (block for block in self.of.get(node, ()) if block.node is node)
        return (block for block in found if not self.is_given(block))

    def _value(self, node: fx.Node) -> Any:
        given = node.meta.get("val")
        if node.op != "call_function" or node.target in _NAMES:
            return _fresh(given)
        if not any(isinstance(x, Tensor) for x in tree_leaves(given)):
            return given
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        args, kwargs = map_arg((node.args, node.kwargs), self.fakes.__getitem__)
        return function(*args, **kwargs)


def _fresh(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return torch.empty(tuple(given.shape), dtype=given.dtype, device=given.device)
