"""Values of tensors that a step makes of constants alone, as `torch.arange(2, x.ndim)`.

Such a tensor has the same values at every call, so a number that Python reads from it is a constant of the
trace: it may be a size, a dim, a plain number or a text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import aliased, is_function, written
from tutti.torch_private.dispatch_modes import no_modes, no_torch_function
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.tracing import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
# Tensors made of few ops, of a size that a trace can compute: others are read as values of the call.
_MOST_NODES, MOST_NUMBERS = 200, 2**26
_LITERALS = frozenset((aten.lift_fresh.default, aten.lift_fresh_copy.default))
# Their results have the form of an operand, not its values.
_OF_FORMS = frozenset(
    (
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
        *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
        *(aten.empty_like.default, aten.new_empty.default),
    )
)
# Nodes that depend on an input or on random numbers: each turn of a loop reads those of the turns before.
_UNKNOWN_NODES: WeakSet[fx.Node] = WeakSet()
# What `known` returns for a tensor that depends on an input or on random numbers.
UNKNOWN: Any = object()


def known(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """`read` of the values of a tensor of the trace that depends on no input; `UNKNOWN` for another one."""
    nodes, root = _constants(x)
    if not nodes or _is_large(nodes):
        return UNKNOWN
    with no_modes(), no_torch_function(), torch.no_grad():
        try:
            values = _computed(nodes, root)
        except (RuntimeError, AssertionError):  # a plan for a device that is not here
            return UNKNOWN
        return read(values)


def is_too_large(x: Tensor) -> bool:
    """Whether a tensor of the trace depends on no input, but has more numbers than `known` computes."""
    return _is_large(_constants(x)[0])


def _constants(x: Tensor) -> tuple[list[fx.Node], Any]:
    """The nodes of which a tensor is made, in order, and the owner of literals; none if one is not known."""
    mode = get_proxy_mode()
    if mode is None or type(x) is not FakeTensor:
        return [], None
    slot = get_proxy_slot(x, mode.tracer, None)
    nodes = [] if slot is None else _made_of(slot.proxy.node)
    return ([], None) if _is_written_past(nodes) else (nodes, mode.tracer.root)


def _is_large(nodes: list[fx.Node]) -> bool:
    return any(x.numel() > MOST_NUMBERS for node in nodes for x in _results(node))


def _results(node: fx.Node) -> Sequence[Any]:
    values = node.meta.get("val")
    return values if isinstance(values, tuple | list) else (values,)


def _made_of(node: fx.Node) -> list[fx.Node]:
    """The nodes of which `node` is made, and itself, in order; none if one of them is not known."""
    readers: dict[fx.Node, fx.Node | None] = {node: None}
    left = [node]
    while left:
        one = left.pop()
        if len(readers) > _MOST_NODES:
            return []
        if one in _UNKNOWN_NODES or not _is_known(one):
            _UNKNOWN_NODES.update(_with_readers(one, readers))
            return []
        given = () if one.target in _OF_FORMS else one.all_input_nodes
        new = [n for n in given if n not in readers]
        readers |= dict.fromkeys(new, one)
        left += new
    return sorted(readers)


def _with_readers(node: fx.Node, readers: Mapping[fx.Node, fx.Node | None]) -> list[fx.Node]:
    """A node, the one that reads it, and so on."""
    found, reader = [node], readers[node]
    while reader is not None:
        found.append(reader)
        reader = readers[reader]
    return found


def _is_known(node: fx.Node) -> bool:
    if node.op == "get_attr":  # a literal, which its users copy; not a tensor from outside
        return all(user.target in _LITERALS for user in node.users)
    for x in _results(node):
        if not isinstance(x, Tensor) or not all(type(n) is int for n in x.shape):
            return False
    return node.target is operator.getitem or is_function(node) or _is_write(node)


def _is_write(node: fx.Node) -> bool:
    random = torch.Tag.nondeterministic_seeded
    return bool(written(node)) and random not in node.target.tags  # type: ignore[union-attr]


def _is_written_past(nodes: list[fx.Node]) -> bool:
    """Whether a write that is none of `nodes` changes the memory of one of them: a write into a view."""
    inside, left = {*nodes}, [*nodes]
    while left:
        node = left.pop()
        for user in node.users:
            if user in inside:
                continue
            if node in written(user):
                return True
            if aliased(user) is node:
                left.append(user)
    return False


def _computed(nodes: list[fx.Node], root: Any) -> Tensor:
    values: dict[fx.Node, Any] = {}
    last = {x: node for node in nodes for x in node.all_input_nodes}
    for node in nodes:
        if node.op == "get_attr":
            values[node] = getattr(root, str(node.target)).clone()
            continue
        given: Any = fx.map_arg(
            (node.args, node.kwargs), lambda n: values[n] if n in values else _form(n)
        )
        args, named = given
        device = node.meta["val"].device if node.target in _OF_FORMS else named.get("device")
        if device is not None:  # "meta" of weights that wait for memory
            named = {**named, "device": "cpu" if torch.device(device).type == "meta" else device}
        values[node] = node.target(*args, **named)  # type: ignore[operator]
        for x in node.all_input_nodes:
            if last[x] is node:
                values.pop(x, None)
    return values[nodes[-1]]


def _form(node: fx.Node) -> Tensor:
    x = node.meta["val"]
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
