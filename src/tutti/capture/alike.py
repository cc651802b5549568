"""A comparison of two captured steps, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.capture.captured import Captured
from tutti.capture.forms import form_of
from tutti.graph.edits.edit import NOTES


def difference(one: Captured, other: Captured) -> str:
    """The first difference between two captured steps; "" for equal ones."""
    for what in ("inputs", "updated", "kinds", "state"):
        if getattr(one, what) != getattr(other, what):
            return what
    if not _alike(_results(one), _results(other)):
        return "results"
    mine, theirs = list(one.graph.nodes), list(other.graph.nodes)
    nodes = dict(zip(mine, theirs, strict=False))
    for x, y in nodes.items():
        if what := _between(one, other, x, y, nodes):
            return f"{what} of {x.format_node()} and {y.format_node()}"
    return "" if len(mine) == len(theirs) else f"{len(mine)} nodes and {len(theirs)}"


def _between(
    one: Captured, other: Captured, x: fx.Node, y: fx.Node, nodes: Mapping[fx.Node, fx.Node]
) -> str:
    """The difference between two nodes; `nodes` maps nodes of `one` to those of `other`."""
    by_name = x.op in ("placeholder", "get_attr")
    if x.op != y.op or not (by_name or x.target == y.target):
        return "the op"
    given = map_arg((x.args, x.kwargs), lambda n: nodes.get(n, n))
    if not _alike(given, (y.args, y.kwargs)):
        return "what is given"
    if _like(x.meta.get("val")) != _like(y.meta.get("val")):
        return f"{_like(x.meta.get('val'))}, {_like(y.meta.get('val'))}: the value"
    if x.op == "get_attr" and not _same_constant(_constant(one, x), _constant(other, y)):
        return "the constant"
    return next((note for note in NOTES if x.meta.get(note) != y.meta.get(note)), "")


def _constant(captured: Captured, node: fx.Node) -> Any:
    return getattr(captured.owner, str(node.target))


def _results(captured: Captured) -> Any:
    effects = [
        ([x.name for x in e.entries], form_of(e.spec), e.num_leaves, e.fixed, e.shared)
        for e in captured.effects
    ]
    numbers = [(n.name, [entry.name for entry in n.entries]) for n in captured.numbers]
    outside = [*captured.outside]
    kept = captured.num_returned, outside, captured.trained, dict(captured.gradients.ends)
    draws = [(one.draw, one.name, one.value) for one in captured.drawn.numbers]
    return form_of(captured.returned), effects, numbers, draws, *kept


def _alike(a: Any, b: Any) -> bool:
    """Whether arguments are equal, and of equal types."""
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        form = tuple(value.shape), value.stride(), value.storage_offset()
        return *form, value.dtype, value.device, value.requires_grad
    return [_like(x) for x in value] if isinstance(value, list | tuple) else type(value)


def _same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and _like(a) == _like(b)
    return both and torch.equal(a, b)
