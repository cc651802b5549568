"""Writes the program of one rank: every op on local tensors, with reshards between values and users."""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.errors import ShardingError
from tutti.graph.edits.edit import erase_dead, source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.boundary import IDENTITIES, boundary
from tutti.graph.text import op_name
from tutti.layout import Layout, Mesh, Sharding
from tutti.partition.choose import Choice, Chooser, OperandOffer
from tutti.partition.localize import Call, Local, emit_local, result_of
from tutti.partition.values import Values
from tutti.propagate.boundaries import COMPUTE
from tutti.propagate.plan import ShardingPlan
from tutti.rules import Rule, is_tensor_call, operands_of
from tutti.rules.rule import results_of
from tutti.user_lines import quoted, users_level

aten = torch.ops.aten
# On a call of the whole step with gathered operands, for lack of a rule.
WITHOUT_RULE = "without_rule"
_ANY = Rule((), (), {})  # of a call without splits


@dataclass
class Program:
    """The program of every rank. Placeholders and output are those of `captured`, on local tensors.

    `made` lists, in order, local nodes with their values of the whole step and their shardings.
    """

    graph: fx.Graph
    captured: Captured
    layout: Layout
    plan: ShardingPlan
    made: list[tuple[fx.Node, fx.Node, Sharding]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the values' shardings; with `micro`, an axis of time."""
        return self.layout.program_mesh

    @property
    def storage(self) -> dict[str, Sharding]:
        """The storage sharding of each state tensor."""
        return self.plan.storage

    @property
    def collectives(self) -> list[fx.Node]:
        """The nodes that move bytes, in order."""
        return [n for n in self.graph.nodes if n.target in collectives.COLLECTIVES]


def partition(
    made: ShardingPlan, *, strict: bool = False, chooser: Chooser | None = None
) -> Program:
    """The program of one rank. With `strict`, an op without a rule is an error instead of a warning.

    `chooser` keeps its choices for further plans with the same book of rules.
    """
    return _PartitionWriter(made, strict, chooser or Chooser(made.mesh)).write()


class _PartitionWriter:
    def __init__(self, made: ShardingPlan, strict: bool, chooser: Chooser) -> None:
        self.plan, self.mesh, self.strict = made, made.mesh, strict
        self.captured = made.captured
        self.local = Local(self.captured.mode, self.mesh, made.slots)
        self.program = Program(self.local.graph, self.captured, made.layout, made)
        self.chooser = chooser
        self.scalars: dict[fx.Node, Any] = {}
        self.wholes: dict[tuple[int, ...], Sharding] = {}
        self.weights: dict[fx.Node, str] = {}  # of the values asked about so far
        self.values = Values(made.spread, self.local, self.scalars, self.program.made)
        self.results: dict[fx.Node, tuple[fx.Node, Choice]] = {}
        self.names = {n: name for name, n in self.captured.placeholders.items()}
        # The axes that split the batch: values split over them stay split.
        self.stays = frozenset({*made.batch_axes, "seq"})

    def write(self) -> Program:
        for node in self.captured.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op in ("placeholder", "get_attr"):
                self._given(node)
            elif node.target is boundary:
                self._boundary(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif is_tensor_call(node):
                self._call(node)
            else:
                self._scalar(node)
        erase_dead(self.local.graph)
        live = set(self.local.graph.nodes)
        self.program.made = [m for m in self.program.made if m[1] in live]
        self.local.graph.lint()
        return self.program

    def _given(self, node: fx.Node) -> None:
        val = node.meta["val"]
        if node.op == "get_attr":
            made = self.local.graph.get_attr(node.target)  # type: ignore[arg-type]
        else:
            made = self.local.graph.placeholder(node.name)
        made.meta = {k: node.meta[k] for k in ("name", "kind") if k in node.meta}
        if not isinstance(val, Tensor):
            self.scalars[node] = made
            made.meta["val"] = val
            return
        name = self.names.get(node, "")
        known = self.plan.storage.get(name) or self.plan.shards.get(name)
        sharding = known or Sharding.whole(val.shape)
        made.meta |= {"val": self.local.empty(val, sharding), "sharding": sharding}
        self.values.keep(node, sharding, made)

    def _scalar(self, node: fx.Node) -> None:
        """Numbers are the same on every rank; a tensor read into a number must be whole."""

        def local(x: fx.Node) -> Any:
            if isinstance(x.meta["val"], Tensor):
                return self.values.reshard(x, Sharding.whole(x.meta["val"].shape), node)
            return self.scalars[x]

        args, kwargs = fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local)
        self.scalars[node] = self.local.call(node.target, args, kwargs, node, node.meta["val"])

    def _boundary(self, node: fx.Node) -> None:
        """A new value with the sharding wanted on its side of the boundary."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        kind = self.plan.boundaries[node]
        wanted = self.plan.spread.of(node)
        if kind.parameter:
            target = self.plan.compute[kind.parameter]
        elif wanted is not None and (wanted.axes or kind.into != "update"):
            target = wanted
        else:
            target = Sharding(self.values.first(source).dims)
        fresh = kind.parameter != ""
        made = self.values.reshard(source, target, node, fresh=fresh)
        self.values.keep(node, target, made)

    def _getitem(self, node: fx.Node) -> None:
        parent: fx.Node = node.args[0]  # type: ignore[assignment]
        index: int = node.args[1]  # type: ignore[assignment]
        if not isinstance(node.meta.get("val"), Tensor):
            self.scalars[node] = self.local.call(
                operator.getitem, (self.results[parent][0], index), {}, node, node.meta.get("val")
            )
            return
        made, choice = self.results[parent]
        self.values.keep(node, choice.results[index], result_of(self.local, made, index, node))
        if node in self.plan.held:
            self._honor(node)

    def _call(self, node: fx.Node) -> None:
        operands = operands_of(node)
        rule, choice = self._chosen(node, operands)
        locals_ = [
            self.values.reshard(x, s, node) for x, s in zip(operands, choice.operands, strict=True)
        ]
        call = Call(self.local, node, choice, locals_, self.scalars.__getitem__)
        made = locals_[0] if node.target in IDENTITIES else emit_local(self.local, node, rule, call)
        if isinstance(node.meta["val"], Tensor):
            self.values.keep(node, choice.results[0], made)
            if node in self.plan.held:
                self._honor(node)
        else:
            self.results[node] = (made, choice)

    def _chosen(self, node: fx.Node, operands: list[fx.Node]) -> tuple[Rule, Choice]:
        """The split of a call, and its rule."""
        if self.mesh.num_ranks == 1:  # no splits, for any rule
            results = tuple(Sharding(()) if r is None else self._whole(r) for r in results_of(node))
            return _ANY, Choice(
                {}, tuple(self._whole(x.meta["val"]) for x in operands), results, 0.0
            )
        rule = self.plan.spread.rule(node) or self._whole_rule(node)
        offers: dict[fx.Node, OperandOffer] = {}
        for x in operands:
            if x not in offers:
                offers[x] = self._offer(x, node)
        choice = self.chooser.choose(rule, [offers[x] for x in operands], self._wanted(node))
        for x, target in zip(operands, choice.operands, strict=True):
            self._refuse_gathered_weight(x, target, node, rule)
        return rule, choice

    def _whole(self, val: Tensor) -> Sharding:
        shape = tuple(val.shape)
        if shape not in self.wholes:
            self.wholes[shape] = Sharding.whole(shape)
        return self.wholes[shape]

    def _honor(self, node: fx.Node) -> None:
        """Apply the user's sharding: from here on the value has that of `shard_as` or `place`."""
        wanted = self.plan.spread.of(node)
        if wanted is not None and wanted.axes:
            self.values.reshard(node, wanted, node)
            self.values.prefer_last(node)

    def _offer(self, x: fx.Node, user: fx.Node) -> OperandOffer:
        val: Tensor = x.meta["val"]
        keeps = self.stays if user.meta.get("region") in COMPUTE else frozenset()
        axes = self.values.first(x).axes
        placed = bool(axes) and bool(self._weight(x))
        if placed:
            keeps = frozenset(axes)
        return OperandOffer(
            tuple(map(int, val.shape)),
            self.values.shardings(x),
            self.plan.spread.of(x),
            keeps,
            len(x.users),
            placed,
        )

    def _refuse_gathered_weight(
        self, x: fx.Node, target: Sharding, node: fx.Node, rule: Rule
    ) -> None:
        """Refuse a `place` that an op cannot take: each step would silently undo it."""
        name = self._weight(x) if self.plan.patterns else ""
        pattern = self.plan.patterns.get(name)
        lost = self.values.first(x).axes - target.axes
        if pattern is None or not lost:
            return
        raise ShardingError(
            f'{op_name(node)} cannot take "{name}" split over {"+".join(sorted(lost))} '
            f"as {self.plan.compute[name]}",
            at=quoted(source_of(node)),
            why=f'place["{pattern}"]; the op splits as "{rule}" ("!" and "1" stay whole)',
            fix="place another dim of it, or leave it out: a weight without a place follows the rest",
        )

    def _weight(self, x: fx.Node) -> str:
        """The weight that `x` is in the forward or backward, or of which it is a view; or ""."""
        if x not in self.weights:
            self.weights[x] = self._weight_of(x)
        return self.weights[x]

    def _weight_of(self, x: fx.Node) -> str:
        kind = self.plan.boundaries.get(x)
        if kind is not None:
            return kind.parameter
        rule = self.plan.spread.rule(x) if is_tensor_call(x) else None
        moved = rule is not None and (rule.structural or x.target is aten._to_copy.default)
        operands = operands_of(x) if moved else []
        return self._weight(operands[0]) if len(operands) == 1 else ""

    def _wanted(self, node: fx.Node) -> list[tuple[tuple[int, ...], Sharding | None] | None]:
        users = (
            {u.args[1]: u for u in node.users if u.target is operator.getitem}
            if not isinstance(node.meta["val"], Tensor)
            else {0: node}
        )
        return [
            None
            if r is None
            else (
                tuple(map(int, r.shape)),
                self.plan.spread.of(users[i]) if i in users else None,
            )
            for i, r in enumerate(results_of(node))
        ]

    def _whole_rule(self, node: fx.Node) -> Rule:
        """Without a rule: all operands and results whole, with one warning, or an error."""
        operands = operands_of(node)
        split = [x for x in operands if not self.values.first(x).is_whole]
        if split:
            where = node.meta.get("source", "")
            if self.strict:
                raise ShardingError(
                    f"no rule says how {node.target} may be split",
                    at=where,
                    why="strict mode does not gather its operands",
                    fix='tutti.rule("namespace::op", "m k, n k -> m n")',
                )
            text = f"{node.target} at {where}"
            if not any(f.partition(" at ")[0] == str(node.target) for f in self.program.fallbacks):
                warnings.warn(
                    f"no rule says how {text} may be split: its operands are gathered on every rank. "
                    'Give one: tutti.rule("namespace::op", "m k, n k -> m n")',
                    stacklevel=users_level(),
                )
            self.program.fallbacks.append(text)
            node.meta[WITHOUT_RULE] = True
        return Rule(
            tuple(((),) * x.meta["val"].ndim for x in operands),
            tuple(() if r is None else ((),) * r.ndim for r in results_of(node)),
            {},
        )

    def _output(self, node: fx.Node) -> None:
        both: Any = node.args[0]
        returned, updates = both
        out = [self._returned(x, node) for x in returned]
        new = [
            self.values.reshard(x, self.plan.storage[name], node)
            for x, name in zip(updates, self.captured.updated, strict=True)
        ]
        self.local.graph.output((out, new))

    def _returned(self, x: Any, node: fx.Node) -> Any:
        if not isinstance(x, fx.Node):
            return x
        if not isinstance(x.meta["val"], Tensor):
            return self.scalars[x]
        return self.values.reshard(x, Sharding.whole(x.meta["val"].shape), node)
