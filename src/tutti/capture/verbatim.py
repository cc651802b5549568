"""Nodes that the second trace takes over from the first as they stand.

To replay a node through PyTorch's dispatcher, only to record the same node, is most of what the second
trace takes. A node is copied instead where nothing of what functionalization does could show:

    t = aten.t(w)          # w is written below: its views are replayed
    y = aten.mm(x, t)      # copied: neither x nor y is ever written, and t not before here
    w.add_(d)              # replayed
    z = aten.mm(y, t)      # replayed: t has changed
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

_torch: Any = torch  # what `torch.func.functionalize` itself is written with


class Copying(fx.Interpreter):
    """Replays a trace inside `functionalize` inside `make_fx`, nodes in `copyable` copied.

    What stands in `env` for a copied node is the node that it became, until a replayed node asks for
    its value.
    """

    def __init__(self, module: fx.GraphModule, copyable: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.copyable = copyable

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, or the node that it became."""
        if n not in self.copyable:
            return super().run_node(n)
        new = _tracer().graph.node_copy(n, lambda x: _node_of(self.env[x]))
        new.kwargs = {k: x for k, x in new.kwargs.items() if not _is_default(new.target, k, x)}
        return new

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The operands of a replayed node, as values."""
        for x in n.all_input_nodes:
            if isinstance(self.env[x], fx.Node):
                self.env[x] = _value_of(self.env[x])
        return super().fetch_args_kwargs_from_env(n)


def _is_default(target: Any, name: str, value: Any) -> bool:
    """Whether an argument says nothing, as the dispatcher sees it: it passes such arguments on to nobody."""
    if value is not None:
        return False
    given = (a for a in target._schema.arguments if a.name == name)
    return any(a.has_default_value() and a.default_value is None for a in given)


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _node_of(value: Any) -> fx.Node:
    """The node that recorded a value which is not about to change."""
    if isinstance(value, fx.Node):
        return value
    if _torch._is_functional_tensor(value):
        value = _torch._from_functional_tensor(value)
    return get_proxy_slot(value, _tracer()).proxy.node


def _value_of(node: fx.Node) -> Tensor:
    """A functional tensor that the trace knows as `node`."""
    tracer, fake = _tracer(), node.meta["val"]
    track_tensor_tree(fake, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    functorch = _torch._C._functorch
    return functorch._wrap_functional_tensor(fake, functorch.maybe_current_level())


def copyable(
    graph: fx.Graph, replayed: Callable[[Any], bool], writers: Collection[Any]
) -> set[fx.Node]:
    """The nodes of a trace that functionalization leaves as they are.

    `replayed` says which ops the replay has a form of its own for; `writers` write into operands though
    their schema does not say so.
    """
    nodes = list(graph.nodes)
    memory = _Memory(nodes)
    first_write: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for x in _written(node, writers):
            first_write.setdefault(memory.of(x), i)
    found: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        if node.target is operator.getitem:
            if node.args[0] in found:
                found.add(node)
            continue
        operands = node.all_input_nodes
        if (
            _is_plain(node)
            and not replayed(node.target)
            and node.target not in writers
            and memory.of(node) not in first_write
            and all(x.op != "get_attr" and _is_tensor(x) for x in operands)
            and all(first_write.get(memory.of(x), i) >= i for x in operands)
        ):
            found.add(node)
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is an op that gives tensors and writes nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    val = node.meta.get("val")
    values = val if isinstance(val, list | tuple) else [val]
    return bool(values) and all(
        v is None or (isinstance(v, Tensor) and v.layout == torch.strided) for v in values
    )


def _written(node: fx.Node, writers: Collection[Any]) -> Iterator[fx.Node]:
    """The operands that a node writes into; of what is no op of PyTorch's, all."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in writers:
        yield from node.all_input_nodes
        return
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes_in(_given(node, i, argument.name))


def _given(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_in(x: Any) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(x, found.append)
    return iter(found)


class _Memory:
    """Which nodes may share memory: by the schema of the ops between them, or by their fake values."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        holders: dict[int, fx.Node] = {}
        for node in nodes:
            for x in _aliased(node):
                self._join(node, x)
            for storage in _storages(node.meta.get("val")):
                self._join(node, holders.setdefault(storage, node))

    def of(self, node: fx.Node) -> fx.Node:
        """The one node that stands for all that may share memory with `node`."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self._parent[self.of(a)] = self.of(b)


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that results of a node may be views of."""
    if node.target is operator.getitem:
        yield from node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        for i, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None:
                yield from _nodes_in(_given(node, i, argument.name))


def _storages(val: Any) -> Iterator[int]:
    for x in val if isinstance(val, list | tuple) else [val]:
        if isinstance(x, Tensor) and x.layout == torch.strided:
            yield x.untyped_storage()._cdata
