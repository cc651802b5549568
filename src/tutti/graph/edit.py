"""Small edits of an fx graph that keep every node's fake value and notes in step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

aten = torch.ops.aten
NOTES = ("source", "forward_source", "module", "region", "stream")
# On a node that computes again what the forward has computed: the name of the node that did at first.
REMADE = "remade"


def source_of(node: fx.Node) -> str:
    """The user's line of a node, for one of the backward that of the forward op behind it; or ""."""
    return node.meta.get("forward_source") or node.meta.get("source") or ""


def value_of(x: Any) -> Any:
    """The fake value of a node; anything else unchanged, containers mapped."""
    return map_arg(x, lambda n: n.meta["val"])


class Editor:
    """Inserts nodes into `graph`, computing their fake values under `mode`, or that of their operands."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode | None = None) -> None:
        self.graph, self.mode = graph, mode or nullcontext()

    def at(self, node: fx.Node) -> Emit:
        """A place right before `node`; what is emitted there inherits the notes of `node`."""
        return Emit(self, node)

    def replace(self, node: fx.Node, new: fx.Node | Sequence[fx.Node | None]) -> None:
        """Let every user of `node` use `new` (a tuple for an op with several results); erase it."""
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            if "output_of" in node.meta:
                new.meta["output_of"] = [*new.meta.get("output_of", ()), *node.meta["output_of"]]
        else:
            for user in list(node.users):
                assert user.target is operator.getitem, user
                chosen = new[user.args[1]]  # type: ignore[index]
                assert chosen is not None, f"result {user.args[1]} of {node.target} is needed"
                user.replace_all_uses_with(chosen)
                self.graph.erase_node(user)
        self.graph.erase_node(node)


class Emit:
    """Emits nodes at one place of a graph: `emit(aten.mul.Tensor, x, 2.0)`."""

    def __init__(self, editor: Editor, before: fx.Node) -> None:
        self.editor, self.before = editor, before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.editor.graph.inserting_before(self.before):
            node = self.editor.graph.call_function(target, args, kwargs)
        with self.editor.mode, torch.no_grad():
            node.meta["val"] = target(*value_of(args), **value_of(kwargs))
        node.meta |= {k: self.before.meta[k] for k in NOTES if k in self.before.meta}
        return node


def stretched(emit: Emit, x: Any, shape: Sequence[int]) -> fx.Node:
    """`x` expanded to `shape`."""
    same = list(value_of(x).shape) == list(shape)
    return x if same else emit(aten.expand.default, x, list(shape))


def shaped(emit: Emit, x: Any, shape: Sequence[int]) -> fx.Node:
    """`x` reshaped to `shape`."""
    same = list(value_of(x).shape) == list(shape)
    return x if same else emit(aten.reshape.default, x, list(shape))


def permuted(emit: Emit, x: Any, order: Sequence[int]) -> fx.Node:
    """`x` with its dims in `order`."""
    return x if list(order) == sorted(order) else emit(aten.permute.default, x, list(order))


def inverse(order: Sequence[int]) -> list[int]:
    """The order that puts dims back that `order` has moved."""
    return sorted(range(len(order)), key=order.__getitem__)
