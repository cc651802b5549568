"""Nodes that the second trace copies from the first.

Most of the second trace's time goes into replays, through PyTorch's dispatcher, that record the same node
again. The trace copies a node instead if functionalization cannot change it:

    t = aten.t(w)          # t is read after w is written: the views of w are replayed
    y = aten.mm(x, t)      # copied: neither x nor y is ever written, and t not before here
    w.add_(d)              # replayed
    z = aten.mm(y, t)      # replayed: t has changed

Most writes are simpler than that, and become new values (`overwrites`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.second_trace.overwrites import Overwrites, rewritten
from tutti.capture.second_trace.sharing import MemorySharing, Writers, is_tensor, written
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.tracing import (
    get_proxy_mode,
    get_proxy_slot,
    plain_of_functional,
    track_tensor_tree,
    wrapped_functional,
)

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Copying(fx.Interpreter):
    """Replays a trace inside `functionalize` inside `make_fx`, and copies the nodes in `copyable`.

    The entry of `env` for a copied node is its copy, until a replayed node needs its value. It records
    `overwrites` as new values.
    """

    def __init__(
        self, module: fx.GraphModule, copyable: Collection[fx.Node], overwrites: Overwrites
    ) -> None:
        super().__init__(module)
        self.copyable, self.overwrites = copyable, overwrites
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._ends: dict[fx.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, or its copy."""
        if n in self.overwrites.values:
            return self._overwrite(n)
        if n not in self.copyable:
            value = super().run_node(n)
            if n in self.overwrites.ends:
                self._inputs[n] = _node_of(value)
            return value
        new = _tracer().graph.node_copy(n, lambda x: _node_of(self.env[x]))
        new.kwargs = {k: x for k, x in new.kwargs.items() if not _is_default(new.target, k, x)}
        return new

    def _overwrite(self, n: fx.Node) -> fx.Node | None:
        graph, values = _tracer().graph, self.overwrites.values[n]
        made = rewritten(n, values, graph, lambda x: _node_of(self.env[x]))
        for names, new in zip(self.overwrites.renamed[n], made, strict=True):
            for name in names:
                self.env[name] = new
                if name.op == "placeholder":
                    self._ends[name] = new
        return made[0] if is_tensor(n) else None

    def write_back(self) -> None:
        """Note the final values of inputs, as `functionalize` does for the writes that it handles."""
        for name in self.overwrites.ends:
            pair = (self._inputs[name], self._ends[name])
            _tracer().graph.call_function(torch.ops.aten.copy_.default, pair)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The operands of a replayed node, as values."""
        for x in n.all_input_nodes:
            if isinstance(self.env[x], fx.Node):
                self.env[x] = _value_of(self.env[x])
        return super().fetch_args_kwargs_from_env(n)


def _is_default(target: Any, name: str, value: Any) -> bool:
    """Whether an argument is the default, which the dispatcher drops."""
    if value is not None:
        return False
    given = (a for a in schema_of(target).arguments if a.name == name)
    return any(a.has_default_value() and a.default_value is None for a in given)


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _node_of(value: Any) -> Any:
    """The node of a value's current version; a plain number is itself."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, _SYMBOLS):
        return get_proxy_slot(value, _tracer()).force().node
    if not isinstance(value, Tensor):
        return value
    return get_proxy_slot(plain_of_functional(value), _tracer()).proxy.node


def _value_of(node: fx.Node) -> Tensor:
    """A functional tensor whose node in the trace is `node`."""
    tracer, fake = _tracer(), node.meta["val"]
    track_tensor_tree(fake, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return wrapped_functional(fake)


def copyable(
    graph: fx.Graph,
    memory: MemorySharing,
    replayed: Callable[[Any], bool],
    writers: Writers,
    renamed: Collection[fx.Node],
) -> set[fx.Node]:
    """The nodes of a trace that functionalization does not change.

    `replayed` tests for ops with another form in the replay, as `writers` have; writes into `renamed` memory
    no longer count (`overwrites`).
    """
    nodes = list(graph.nodes)
    first_write: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for x in written(node, writers):
            if memory.of(x) not in renamed:
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
            and all(x.op != "get_attr" and is_tensor(x) for x in operands)
            and all(first_write.get(memory.of(x), i) >= i for x in operands)
        ):
            found.add(node)
    return found


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is an op that makes tensors and writes none."""
    if not isinstance(node.target, OpOverload) or schema_of(node.target).is_mutable:
        return False
    val = node.meta.get("val")
    values = val if isinstance(val, list | tuple) else [val]
    return bool(values) and all(
        v is None or (isinstance(v, Tensor) and v.layout == torch.strided) for v in values
    )
