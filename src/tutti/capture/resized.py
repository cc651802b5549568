"""One trace with symbols for sizes of the batch, and the captured steps that it gives for actual sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.capture.captured import Captured
from tutti.capture.python.read_values import ITEM
from tutti.capture.python.sizes import FreeSizes, Shapes
from tutti.capture.python.symbols import SYMBOLS
from tutti.capture.spelling.canonical import canonicalize, canonicalize_but
from tutti.capture.state.lift import StateTensor
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.pytrees import tree_map
from tutti.torch_private.symbolic import expression_of

aten = torch.ops.aten
# Ops that ask a tensor for a size, which is known without the tensor.
_ASKS = frozenset(
    {
        aten.sym_size.int,
        aten.sym_stride.int,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
    }
)
_NUMBERS = (*SYMBOLS, int, float, bool)


class NotResizableError(Exception):
    """A trace that is valid for its own sizes only."""


class Resizable:
    """A trace that serves every batch whose sizes keep its guards.

    Args:
        captured: the result of `capture` with `free` sizes.
        shapes: of the traced batch.

    Raises:
        NotResizableError: if a branch, or an op, has made constants of all free sizes.
    """

    def __init__(self, captured: Captured, free: FreeSizes, shapes: Shapes) -> None:
        self.captured, self.free = captured, free
        self._fixed = free.fixed(shapes)
        env = captured.mode.shape_env
        assert env is not None
        if any(n.target is ITEM for n in captured.graph.nodes) or captured.reads:
            raise NotResizableError  # its branches hold for one size
        if all(env.replace(s).is_number for s in free.symbols.values()):
            raise NotResizableError
        self.symbols = frozenset(free.symbols.values())
        canonicalize_but(self._is_sized, captured.graph, captured.mode)
        self._values = {n: self._form(n.meta.get("val")) for n in captured.graph.nodes}

    def of(self, shapes: Shapes, state: list[StateTensor]) -> Captured | None:
        """The captured step of a batch of these shapes; None if the trace is not valid for it."""
        sizes = self._sizes(shapes)
        guards = self._guards(sizes) if sizes is not None else None
        if sizes is None or guards is None:
            return None
        graph = _Copy(self, sizes).graph()
        made = replace(self.captured, graph=graph, state=state, guards=guards)
        canonicalize(graph, made.owner, made.mode)
        return made

    def _sizes(self, shapes: Shapes) -> Sizes | None:
        if self.free.fixed(shapes) != self._fixed:
            return None
        found = self.free.sizes_in(shapes)
        return None if found is None else Sizes({self.free.symbols[g]: n for g, n in found.items()})

    def _guards(self, sizes: Sizes) -> list[Any] | None:
        """The remaining guards, on numbers; None if a guard on sizes fails."""
        found: list[Any] = []
        for guard in self.captured.guards:
            left = sizes.put_into(guard)
            if left is sympy.false:
                return None
            if left is not sympy.true:
                found.append(left)
        return found

    def _is_sized(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, SYMBOLS) or self._form(value) is not None

    def form_of(self, node: fx.Node) -> Any:
        """The form of a node's fake value, in symbols; None without symbols."""
        return self._values[node]

    def _form(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            forms = [self._form(x) for x in value]
            return None if all(f is None for f in forms) else forms
        if not isinstance(value, FakeTensor) or value.layout != torch.strided:
            return None
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        if all(type(n) is int for n in numbers):
            return None
        exprs = tuple(expression_of(n) if isinstance(n, torch.SymInt) else n for n in numbers)
        return exprs, value.dtype, value.device, value.requires_grad


class Sizes:
    """Given sizes, by symbol."""

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self._sizes = {symbol: sympy.Integer(n) for symbol, n in sizes.items()}
        self._known: dict[Any, int] = {}

    def put_into(self, expr: Any) -> Any:
        """An expression with sizes in place of their symbols."""
        return expr.xreplace(self._sizes)

    def number(self, expr: Any) -> int:
        """The integer value of an expression in sizes only."""
        if type(expr) is int:
            return expr
        if expr not in self._known:
            self._known[expr] = int(self.put_into(expr))
        return self._known[expr]


class _Copy:
    """A copy of a trace's graph with numbers for symbols of sizes."""

    def __init__(self, trace: Resizable, sizes: Sizes) -> None:
        self._trace, self._sizes_of, self._mode = trace, sizes, trace.captured.mode
        self._made: dict[Any, Tensor] = {}
        self._new: dict[fx.Node, Any] = {}

    def graph(self) -> fx.Graph:
        """The copy."""
        graph = fx.Graph()
        for node in self._trace.captured.graph.nodes:
            if node.op == "output":
                graph.output(self._put(node.args[0]))
            elif isinstance(node.meta.get("val"), _NUMBERS):
                self._new[node] = self._symbol(graph, node)
            else:
                self._copy(graph, node)
        return graph

    def _put(self, argument: Any) -> Any:
        return map_arg(argument, self._new.__getitem__)

    def _copy(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        new = self._new[node] = graph.node_copy(node, self._new.__getitem__)
        new.meta = dict(node.meta)
        form = self._trace.form_of(node)
        if form is not None:
            new.meta["val"] = self._value(node.meta["val"], form)
        return new

    def _symbol(self, graph: fx.Graph, node: fx.Node) -> Any:
        """A plain number for an expression of sizes and numbers only; else a node."""
        value, target = node.meta["val"], node.target
        if node.op != "call_function" or not callable(target):
            return self._copy(graph, node)
        if target in _ASKS:
            return self._sizes_of.number(expression_of(value))
        args, kwargs = self._put(node.args), self._put(node.kwargs)
        left: list[fx.Node] = []
        map_arg((args, kwargs), left.append)
        if not left:  # as Python computes it without symbols
            return target(*args, **kwargs)
        new = self._copy(graph, node)
        if isinstance(value, SYMBOLS) and expression_of(value).free_symbols & self._trace.symbols:
            given = tree_map(_value_of, (args, kwargs))
            new.meta["val"] = target(*given[0], **given[1])
        return new

    def _value(self, value: Any, form: Any) -> Any:
        if isinstance(value, list | tuple):
            made = [x if f is None else self._value(x, f) for x, f in zip(value, form, strict=True)]
            return type(value)(made)
        exprs, dtype, device, requires_grad = form
        numbers = tuple(map(self._sizes_of.number, exprs))
        key = numbers, dtype, device, requires_grad
        if key not in self._made:
            rank = len(value.shape)
            with self._mode, torch.no_grad():
                made = _fake(numbers[:rank], numbers[rank:-1], numbers[-1], dtype, device)
            self._made[key] = made.requires_grad_(requires_grad)
        return self._made[key]


def _value_of(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, fx.Node) else x


def _fake(shape: Any, stride: Any, offset: int, dtype: Any, device: Any) -> Tensor:
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    whole = torch.empty(offset + last + 1, dtype=dtype, device=device)
    return whole.as_strided(shape, stride, offset)
