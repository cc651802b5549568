"""Emits one op of the local program: local operands for global ones, local shapes in its arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.edits.edit import NOTES, value_of
from tutti.graph.ops import collectives
from tutti.graph.randomness.draw import draw
from tutti.layout import Mesh, Sharding
from tutti.partition.choose import Choice
from tutti.rules import Rule
from tutti.torch_private.fake_tensors import FakeTensorMode, empty_fake


class Local:
    """The local graph under construction.

    `slots` maps values of the whole step on slots to the experts of these, `num_slots` the latter to the
    local number of slots to move.
    """

    def __init__(
        self, mode: FakeTensorMode, mesh: Mesh, slots: Mapping[fx.Node, fx.Node] | None = None
    ) -> None:
        self.graph, self.mode, self.mesh = fx.Graph(), mode, mesh
        self.slots: Mapping[fx.Node, fx.Node] = slots or {}
        self.num_slots: dict[fx.Node, fx.Node] = {}
        self._empty: dict[Any, Tensor] = {}

    def call(self, target: Any, args: Any, kwargs: Any, like: fx.Node, val: Any = None) -> fx.Node:
        """A node with the notes of global node `like`; the operands give `val` by default."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta = {k: like.meta[k] for k in NOTES if k in like.meta}
        if val is None:
            with self.mode, torch.no_grad():
                val = target(*value_of(tuple(args)), **value_of(dict(kwargs)))
        node.meta["val"] = val
        return node

    def empty(
        self, like: Tensor, sharding: Sharding, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A fake local tensor of `like`'s device and dtype, or of another one.

        It gives the type of a value, not its memory: values of one type share a fake.
        """
        key = (sharding.local_shape(self.mesh), dtype or like.dtype, like.device)
        found = self._empty.get(key)
        if found is None:
            found = self._empty[key] = empty_fake(self.mode, *key)
        return found


class Call:
    """One op in translation; the `LocalCall` of the functions in `rules.families.part_ops`."""

    def __init__(
        self, local: Local, node: fx.Node, choice: Choice, operands: list[fx.Node], scalars: Any
    ) -> None:
        self.local, self.node, self.choice = local, node, choice
        given = iter(operands)
        self.args: list[Any] = [_substituted(a, given, scalars) for a in node.args]
        self.kwargs: dict[str, Any] = {
            k: _substituted(v, given, scalars) for k, v in node.kwargs.items()
        }

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the local graph."""
        return self.local.call(target, args, kwargs, self.node)

    def positions(self, operand: int, dim: int) -> fx.Node:
        """The global indices that this rank holds along `dim` of an operand (-1: the first result)."""
        sharding = self.choice.results[0] if operand < 0 else self.choice.operands[operand]
        size = sharding.local_shape(self.local.mesh)[dim]
        first = self.node.meta["val"]
        device = first.device if isinstance(first, Tensor) else first[0].device
        with self.local.mode:
            val = torch.empty(size, dtype=torch.int64, device=device)
        args = (str(Sharding(sharding.dims)), dim, str(device))
        return self.local.call(collectives.positions, args, {}, self.node, val)

    def result_shape(self) -> list[int]:
        """The shape of this rank's part of the (first) result."""
        return list(self.choice.results[0].local_shape(self.local.mesh))


def _substituted(x: Any, operands: Iterator[fx.Node], scalars: Any) -> Any:
    if isinstance(x, fx.Node):
        return next(operands) if isinstance(x.meta["val"], Tensor) else scalars(x)
    if isinstance(x, list | tuple):
        return type(x)(_substituted(y, operands, scalars) for y in x)
    return x


def emit_local(local: Local, node: fx.Node, rule: Rule, call: Call) -> fx.Node:
    """Emit the local form of `node` under its choice."""
    choice, mesh = call.choice, local.mesh
    if node.target is draw:
        return _draw(local, node, choice)
    for factor, part in rule.parts.items():
        if factor in choice.assigned:
            return part(call)
    args = list(call.args)
    if rule.shape_argument is not None:
        args[rule.shape_argument] = list(choice.results[0].local_shape(mesh))
    val = node.meta["val"]
    if isinstance(val, Tensor):
        fake: Any = local.empty(val, choice.results[0])
    else:
        fake = [
            local.empty(v, s) if isinstance(v, Tensor) else v
            for v, s in zip(val, choice.results, strict=True)
        ]
    return local.call(node.target, args, call.kwargs, node, fake)


def _draw(local: Local, node: fx.Node, choice: Choice) -> fx.Node:
    sharding = choice.results[0]
    args = (*node.args, str(sharding))
    return local.call(
        collectives.draw_part, args, {}, node, local.empty(node.meta["val"], sharding)
    )


def result_of(local: Local, made: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """Result `index` of a call with several results."""
    return local.call(operator.getitem, (made, index), {}, like, made.meta["val"][index])
