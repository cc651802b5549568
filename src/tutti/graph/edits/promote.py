"""A graph in float64 throughout: its differences are then mistakes, not rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.graph.ops.loop import loop
from tutti.graph.ops.plain_attention import PLAIN_FORMS

aten = torch.ops.aten
WIDE = torch.float64
WIDE_COMPLEX = torch.complex128
Promoted = tuple[fx.Graph, nn.Module, dict[fx.Node, fx.Node]]

_DEFAULT = (
    threading.Lock()
)  # the default dtype is the whole process's, and pipeline ranks are threads


def promoted_value(x: Any) -> Any:
    """A floating tensor in float64, a complex one in two of these; anything else unchanged."""
    return x.to(_wide(x.dtype)) if isinstance(x, Tensor) else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return WIDE_COMPLEX
    return WIDE if dtype.is_floating_point else dtype


def _promoted_argument(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return _wide(x)
    if isinstance(x, list | tuple):
        return type(x)(_promoted_argument(y) for y in x)
    return x


def promoted(graph: fx.Graph, owner: nn.Module) -> Promoted:
    """A copy of `graph` with every floating dtype float64, its constants too, and the map from new to old
    nodes.

    Models cast to float32 inside (norms, rotary tables, losses); these casts become float64, too.
    """
    constants = nn.Module()
    out, mapped = _promoted(graph, owner, constants)
    return out, constants, {new: old for old, new in mapped.items()}


def _promoted(
    graph: fx.Graph, owner: nn.Module, constants: nn.Module
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    out, mapped = fx.Graph(), {}
    out.output(out.graph_copy(graph, mapped))
    for node in out.nodes:
        if node.op == "get_attr":
            constants.register_buffer(
                str(node.target), promoted_value(getattr(owner, str(node.target)))
            )
        elif node.target is loop:
            body, given = node.args
            node.args = (body.with_graphs(lambda _, g: _promoted(g, owner, constants)[0]), given)
        elif node.op == "call_function":
            node.args = _promoted_argument(node.args)
            node.kwargs = {k: _promoted_argument(v) for k, v in node.kwargs.items()}
            node.target = PLAIN_FORMS.get(node.target, node.target)
            if _takes_the_default(node):
                node.target = _Wide(node.target)  # type: ignore[arg-type]
            if node.target in (aten._log_softmax.default, aten._softmax.default):
                node.args = (*node.args[:2], False)
    return out, mapped


class _Wide:
    """An op whose result has the default dtype, where that is float64: `torch.arange(8) * 0.1`."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op
        self.__name__ = getattr(op, "__name__", str(op))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _DEFAULT:
            before = torch.get_default_dtype()
            torch.set_default_dtype(WIDE)
            try:
                return self.op(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)


def _takes_the_default(node: fx.Node) -> bool:
    """Whether a floating result has no floating operand: only integer tensors or Python's numbers."""
    if getattr(node.target, "namespace", "tutti") == "tutti":  # tutti's own ops take a dtype
        return False
    given = [x.meta.get("val") for x in node.all_input_nodes]
    return _is_inexact(node.meta.get("val")) and not any(map(_is_inexact, given))


def _is_inexact(val: Any) -> bool:
    if isinstance(val, list | tuple):
        return any(map(_is_inexact, val))
    return isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())
