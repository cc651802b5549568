"""The memory of each value of a graph, found by a run of the graph on fake tensors.

A fake run allocates as a real one does: views share memory, a reshape of permuted values copies, an in-place
op writes into its operand, one op may make several tensors. So this file needs no list of ops. A matmul or an
element-by-element op of contiguous operands does not run: it makes new, contiguous memory.

Of memory that the ranks of a host share, each rank counts its share: a gathered weight that is a view counts
for none beyond the parts. The buffers of a program are one block, which exists before and after the call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.graph.analysis.aliases import IN_PLACE, keeps_order
from tutti.graph.analysis.collective_scratch import BEGUN, is_of_gpus, results_in
from tutti.graph.analysis.known_calls import called
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.graph.randomness.draw import draw
from tutti.torch_private.fake_tensors import FakeTensor, FakeTensorMode, empty_fake
from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.storages import storage_id

# Values that exist before and after the call: constants of the generated code, or kept memory.
_CONSTANTS = (collectives.positions, collectives.buffer)
_FORMATS_IN_ORDER = (None, torch.preserve_format, torch.contiguous_format)
# Targets without a kernel for fake tensors: they make new, contiguous memory.
_NAMES = frozenset({*collectives.PLAYED, draw, loop})


@dataclass(frozen=True, eq=False)
class StorageBlock:
    """A piece of memory of `nbytes`, made by `node`; views and in-place results share it."""

    node: fx.Node
    nbytes: int


class Storages:
    """The blocks of each node of `graph`: one for each of its tensors.

    Inputs and constants have blocks, too, which outlive the graph.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.of: dict[fx.Node, tuple[StorageBlock, ...]] = {}
        self.fakes: dict[fx.Node, Any] = {}
        known: dict[int, StorageBlock] = {}
        self._arenas = _arenas(graph, mode)
        self._state = {n.meta.get("name"): n for n in graph.nodes if n.op == "placeholder"}
        for node in graph.nodes:
            if node.op == "output":
                continue
            value = self.fakes[node] = self._value(node)
            blocks: dict[StorageBlock, None] = {}
            for x in [value] if isinstance(value, Tensor) else tree_leaves(value):
                if isinstance(x, Tensor):
                    memory = x.untyped_storage()
                    nbytes = 0 if _is_look(node) else _kept_nbytes(node, memory.nbytes())
                    number = storage_id(memory)
                    block = known.get(number) or StorageBlock(node, nbytes)
                    blocks[known.setdefault(number, block)] = None
            self.of[node] = tuple(blocks)

    @staticmethod
    def is_given(block: StorageBlock) -> bool:
        """Whether the block exists before and after the call: an input or a constant."""
        return block.node.op != "call_function" or block.node.target in _CONSTANTS

    def given(self) -> list[StorageBlock]:
        """The blocks of inputs and constants."""
        found = dict.fromkeys(b for blocks in self.of.values() for b in blocks)
        return [b for b in found if self.is_given(b)]

    def made(self, node: fx.Node) -> Iterator[StorageBlock]:
        """The blocks that `node` allocates."""
        found = (block for block in self.of.get(node, ()) if block.node is node)
        return (block for block in found if not self.is_given(block))

    def _value(self, node: fx.Node) -> Any:
        given = node.meta.get("val")
        if node.op == "call_function" and node.target in _SHARED:
            with self.mode, torch.no_grad():
                return self._shared(node, *map_arg(node.args, self.fakes.__getitem__))
        if node.target in (collectives.together, collectives.start) and not is_of_gpus(node):
            return results_in(node, self.mode)
        if node.target is collectives.finish and not is_of_gpus(node):
            return self.fakes[node.args[0]]  # type: ignore[index]
        if node.op == "placeholder" and BEGUN in node.meta:
            return self._fresh(node.meta[BEGUN])
        if node.op != "call_function" or node.target in _NAMES:
            return self._fresh(given)
        if not isinstance(given, Tensor):
            if not any(isinstance(x, Tensor) for x in tree_leaves(given)):
                return given
        elif node.target is operator.getitem:
            return self.fakes[node.args[0]][node.args[1]]  # type: ignore[index]
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        if keeps_order(function) and self._is_contiguous(node):
            return self._fresh(given)
        args, kwargs = map_arg((node.args, node.kwargs), self.fakes.__getitem__)
        return called(self.mode, function, args, kwargs)

    def _is_contiguous(self, node: fx.Node) -> bool:
        """Whether the operands of an op that keeps their order are contiguous, so that its results are.

        Sizes must be numbers: symbols would get guards.
        """
        if node.kwargs.get("memory_format") not in _FORMATS_IN_ORDER:
            return False
        operands = [self.fakes[x] for x in node.all_input_nodes]
        return all(
            type(x) is FakeTensor and all(type(n) is int for n in x.shape) and x.is_contiguous()
            for x in operands
        )

    def _shared(self, node: fx.Node, *args: Any) -> Any:
        """The value of a node in existing memory."""
        if node.target is collectives.buffer:
            axes, offset, shape, dtype = args
            nbytes = math.prod(shape) * dtype.itemsize
            return self._arenas[axes][offset : offset + nbytes].view(dtype).view(shape)
        if node.target is collectives.part:
            own: Tensor = node.meta["val"]
            return args[0].as_strided(own.shape, args[0].stride())
        if node.target is collectives.gather_into:
            return [self.fakes[self._state[name]] for name in args[0]]
        if args[0] in IN_PLACE:
            return list(args[1])
        return self._fresh(node.meta["val"])

    def _fresh(self, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [self._fresh(x) for x in given]
        if not isinstance(given, Tensor):
            return given
        return empty_fake(self.mode, tuple(given.shape), given.dtype, given.device)


def _kept_nbytes(node: fx.Node, nbytes: int) -> int:
    """The bytes of the memory of a result: some losses are reduced within the memory of all elements."""
    if node.target not in LOSSES_IN_PLACE:
        return nbytes
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    return max(nbytes, x.numel() * node.meta["val"].element_size())


# Losses whose result, one number, stays in memory of the size of their operands.
LOSSES_IN_PLACE = (
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
)
_SHARED = (collectives.buffer, collectives.part, collectives.gather_into, collectives.together_)


def _is_look(node: fx.Node) -> bool:
    """Whether `node` is a view of the parts of all ranks, in place."""
    return node.target is collectives.together_ and node.args[0] == "all_gather"


def _arenas(graph: fx.Graph, mode: FakeTensorMode) -> dict[Any, Tensor]:
    """Fake bytes for the buffers over each tuple of axes."""
    nbytes: dict[Any, int] = {}
    for node in graph.nodes:
        if node.target is collectives.buffer:
            axes, offset = node.args[:2]
            nbytes[axes] = max(nbytes.get(axes, 0), offset + node.meta["val"].nbytes)
    with mode:
        return {axes: torch.empty(n, dtype=torch.uint8) for axes, n in nbytes.items()}
