"""Small edits of an fx graph that keep the fake value and the notes of every node up to date."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tutti.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.quick_fakes import CONSTANTS

aten = torch.ops.aten
NOTES = ("source", "forward_source", "module", "region", "stream")
# On a recomputed node: the name of the forward's node of the same value.
RECOMPUTED = "recomputed"
# On a gradient that an optimizer reads from `.grad`: its parameters, each as "call of the step/name".
GRADIENT_OF = "gradient_of"
# Notes that a replacement inherits from its node; each is a list.
HANDED_ON = ("output_of", GRADIENT_OF)


def source_of(node: fx.Node) -> str:
    """The user's line of a node, for a backward node that of its forward op; or ""."""
    return node.meta.get("forward_source") or node.meta.get("source") or ""


def value_of(x: Any) -> Any:
    """The fake value of a node; anything else unchanged, containers mapped."""
    return map_arg(x, lambda n: n.meta["val"])


class _Unlike(Exception):
    """An operand without a form to compare."""


def _call_form(target: Any, args: Any, kwargs: Any) -> Any:
    """The key of a call's fake value; None for a call that may return an operand."""
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return None
    try:
        return target, _form(args), tuple((k, _form(v)) for k, v in kwargs.items())
    except _Unlike:
        return None


def _form(x: Any) -> Any:
    if isinstance(x, fx.Node):
        x = x.meta["val"]
    if type(x) in CONSTANTS:
        return type(x), x
    if isinstance(x, list | tuple):
        return tuple(map(_form, x))
    if type(x) is not FakeTensor or x.constant is not None or x.layout != torch.strided:
        raise _Unlike
    sizes = tuple(x.shape), x.stride(), x.storage_offset()
    if any(type(n) is not int for n in (*sizes[0], *sizes[1], sizes[2])):
        raise _Unlike
    return *sizes, x.dtype, x.device, x.requires_grad


# Each pass, and each batch of new sizes, computes many fake values again.
_MOST_KNOWN = 10_000


def _known_values(args: Any, mode: Any) -> dict[Any, Any]:
    """The cached fake values of `mode`, or of the operands' mode, by `_call_form`; the mode owns them."""
    for x in (mode, *args):
        value = x.meta["val"] if isinstance(x, fx.Node) else x
        of = value.fake_mode if isinstance(value, FakeTensor) else value
        if isinstance(of, FakeTensorMode):
            known = vars(of).setdefault("_known_values", {})
            if len(known) > _MOST_KNOWN:
                known.clear()
            return known
    return {}


class Editor:
    """Inserts nodes into `graph`, computing their fake values under `mode`, or that of their operands."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode | None = None) -> None:
        self.graph, self.mode = graph, mode or nullcontext()

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake value of a call; calls with operands of the same form, as in equal layers, share one."""
        key = _call_form(target, args, kwargs)
        known = _known_values(args, self.mode) if key is not None else {}
        if key in known:
            return known[key]
        with self.mode, torch.no_grad():
            value = target(*value_of(args), **value_of(kwargs))
        if key is not None and not isinstance(value, list):
            known[key] = value
        return value

    def at(self, node: fx.Node) -> Emit:
        """A place right before `node`; nodes emitted there inherit its notes."""
        return Emit(self, node)

    def replace(self, node: fx.Node, new: fx.Node | Sequence[fx.Node | None]) -> None:
        """Let every user of `node` use `new` (a tuple for an op with several results); erase it."""
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            for key in HANDED_ON:
                if key in node.meta:
                    new.meta[key] = [*new.meta.get(key, ()), *node.meta[key]]
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
        node.meta["val"] = self.editor.value(target, args, kwargs)
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


def squares(emit: Callable[..., fx.Node], x: Any) -> fx.Node:
    """The squared sizes of the elements of `x`: real, also of complex ones."""
    size = emit(aten.abs.default, x) if value_of(x).is_complex() else x
    return emit(aten.mul.Tensor, size, size)


def added(emit: Emit, node: fx.Node, x: Any, product: fx.Node) -> fx.Node:
    """beta * x + alpha * product of an `addmm` or its like; the product may be split over its inner dim.

    With beta=0 nothing of `x` enters, not even NaN.
    """
    beta: Any = node.kwargs.get("beta", 1)
    alpha: Any = node.kwargs.get("alpha", 1)
    if not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex()):
        beta, alpha = int(beta), int(alpha)  # as PyTorch cuts off their fractions
    if alpha != 1:
        product = emit(aten.mul.Tensor, product, alpha)
    if beta == 0:
        return product
    if beta != 1:
        x = emit(aten.mul.Tensor, x, beta)
    return emit(aten.add.Tensor, product, x)


def inverse(order: Sequence[int]) -> list[int]:
    """The inverse of the permutation `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def erase_dead(graph: fx.Graph) -> None:
    """Erase unused nodes, random and profiler ops included; placeholders stay."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
