"""The nodes of a trace that may share memory, and the operands into which a node writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import marked
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.storages import memory_id

# Positions of the written operands of a call, for ops whose schema does not give them for every call.
Writers = Mapping[Any, Callable[[fx.Node], Sequence[int]]]


class MemorySharing:
    """Sets of nodes that may share memory: by the schema of the ops between them, or by their fake values."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        holders: dict[int, fx.Node] = {}
        for node in nodes:
            if _makes_several(node):
                continue  # its results have nodes of their own
            for x in _aliased(node):
                self._join(node, x)
            for storage in _storages(node.meta.get("val")):
                self._join(node, holders.setdefault(storage, node))

    def of(self, node: fx.Node) -> fx.Node:
        """The representative of all nodes that may share memory with `node`."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self._parent[self.of(a)] = self.of(b)


def written(node: fx.Node, writers: Writers) -> Iterator[fx.Node]:
    """The operands into which a node writes; all of them for a function that is not PyTorch's."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if not isinstance(node.target, OpOverload):
        yield from node.all_input_nodes
        return
    if node.target in writers:
        found = (node.args[position] for position in writers[node.target](node))
        yield from (x for x in found if isinstance(x, fx.Node))
    else:
        yield from marked(node, writes=True)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of which results may be views."""
    if node.target is operator.getitem:
        yield from (x for x in node.all_input_nodes if not _makes_several(x))
    elif isinstance(node.target, OpOverload) and schema_of(node.target).returns:
        yield from marked(node, writes=False)


def _makes_several(node: fx.Node) -> bool:
    """Whether a node makes several tensors, each in new memory."""
    target, val = node.target, node.meta.get("val")
    return (
        isinstance(target, OpOverload)
        and isinstance(val, list | tuple)
        and all(argument.alias_info is None for argument in schema_of(target).arguments)
    )


def _storages(val: Any) -> Iterator[int]:
    for x in val if isinstance(val, list | tuple) else [val]:
        if isinstance(x, Tensor) and x.layout == torch.strided:
            yield memory_id(x)
