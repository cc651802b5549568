"""Writes the program of one rank: every op on local tensors, reshards where values and users disagree."""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.canonical import erase_dead
from tutti.capture.regions import quoted
from tutti.capture.step import Captured
from tutti.errors import ShardingError
from tutti.graph import collectives
from tutti.graph.boundary import IDENTITIES, boundary
from tutti.graph.text import op_name
from tutti.layout import Layout, Mesh, Sharding
from tutti.partition.choose import Choice, Offer, choose
from tutti.partition.localize import Call, Local, emit_local, result_of
from tutti.partition.reshard import LATENCY, route
from tutti.partition.wide import Mover
from tutti.propagate.boundaries import COMPUTE
from tutti.propagate.factors import project, read
from tutti.propagate.plan import Plan
from tutti.rules import Rule, is_tensor_call, operands_of
from tutti.rules.rule import results_of

aten = torch.ops.aten
# What the batch is split over: values that are split so stay so.
BATCH_AXES = frozenset({"data", "seq"})


@dataclass
class Program:
    """What every rank runs. Placeholders and output are those of `captured`, on local tensors.

    `made` lists which local node holds which value of the whole step, and how, in order.
    """

    graph: fx.Graph
    captured: Captured
    layout: Layout
    plan: Plan
    made: list[tuple[fx.Node, fx.Node, Sharding]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh

    @property
    def storage(self) -> dict[str, Sharding]:
        """How each state tensor is kept."""
        return self.plan.storage

    @property
    def collectives(self) -> list[fx.Node]:
        """The nodes that move bytes, in order."""
        return [n for n in self.graph.nodes if n.target in collectives.COLLECTIVES]


@dataclass
class _Version:
    sharding: Sharding
    node: fx.Node


def partition(made: Plan, *, strict: bool = False) -> Program:
    """The program of one rank. With `strict`, an op without a rule is an error instead of a warning."""
    return _Writer(made, strict).write()


class _Writer:
    def __init__(self, made: Plan, strict: bool) -> None:
        self.plan, self.mesh, self.strict = made, made.mesh, strict
        self.captured = made.captured
        self.local = Local(self.captured.mode, self.mesh)
        self.program = Program(self.local.graph, self.captured, made.layout, made)
        self.versions: dict[fx.Node, list[_Version]] = {}
        self.scalars: dict[fx.Node, Any] = {}
        self.results: dict[fx.Node, tuple[fx.Node, Choice]] = {}
        self.names = {n: name for name, n in self.captured.placeholders.items()}

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

    def _keep(self, node: fx.Node, sharding: Sharding, local: fx.Node) -> None:
        self.versions[node] = [_Version(sharding, local)]
        local.meta.setdefault("sharding", sharding)
        self.program.made.append((node, local, sharding))

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
        sharding = self.plan.storage.get(name) or Sharding.whole(val.shape)
        made.meta |= {"val": self.local.empty(val, sharding), "sharding": sharding}
        self._keep(node, sharding, made)

    def _scalar(self, node: fx.Node) -> None:
        """Numbers are the same on every rank; a tensor read into a number must be whole."""

        def local(x: fx.Node) -> Any:
            if isinstance(x.meta["val"], Tensor):
                return self._reshard(x, Sharding.whole(x.meta["val"].shape), node)
            return self.scalars[x]

        args, kwargs = fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local)
        self.scalars[node] = self.local.call(node.target, args, kwargs, node, node.meta["val"])

    def _boundary(self, node: fx.Node) -> None:
        """A new value that lies as its side of the boundary wants it."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        kind = self.plan.boundaries[node]
        wanted = self.plan.spread.of(node)
        if kind.parameter:
            target = self.plan.compute[kind.parameter]
        elif wanted is not None and (wanted.axes or kind.into != "update"):
            target = wanted
        else:
            target = Sharding(self.versions[source][0].sharding.dims)
        fresh = kind.parameter != ""
        made = self._reshard(source, target, node, fresh=fresh)
        self.versions[node] = [_Version(target, made)]
        self.program.made.append((node, made, target))

    def _getitem(self, node: fx.Node) -> None:
        parent: fx.Node = node.args[0]  # type: ignore[assignment]
        index: int = node.args[1]  # type: ignore[assignment]
        if not isinstance(node.meta.get("val"), Tensor):
            self.scalars[node] = self.local.call(
                operator.getitem, (self.results[parent][0], index), {}, node, node.meta.get("val")
            )
            return
        made, choice = self.results[parent]
        self._keep(node, choice.results[index], result_of(self.local, made, index, node))
        if node in self.plan.held:
            self._honor(node)

    def _call(self, node: fx.Node) -> None:
        rule = self.plan.spread.rule(node) or self._whole_rule(node)
        operands = operands_of(node)
        offers: dict[fx.Node, Offer] = {}
        for x in operands:
            if x not in offers:
                offers[x] = self._offer(x, node)
        wanted = self._wanted(node)
        choice = choose(rule, [offers[x] for x in operands], wanted, self.mesh)
        for x, target in zip(operands, choice.operands, strict=True):
            self._refuse_gathered_weight(x, target, node, rule)
        locals_ = [
            self._reshard(x, s, node) for x, s in zip(operands, choice.operands, strict=True)
        ]
        call = Call(self.local, node, choice, locals_, self.scalars.__getitem__)
        made = locals_[0] if node.target in IDENTITIES else emit_local(self.local, node, rule, call)
        if isinstance(node.meta["val"], Tensor):
            self._keep(node, choice.results[0], made)
            if node in self.plan.held:
                self._honor(node)
        else:
            self.results[node] = (made, choice)

    def _honor(self, node: fx.Node) -> None:
        """The user's word: from here on the value lies as `shard_as` or `place` says."""
        wanted = self.plan.spread.of(node)
        if wanted is not None and wanted.axes:
            self._reshard(node, wanted, node)
            self.versions[node].reverse()

    def _offer(self, x: fx.Node, user: fx.Node) -> Offer:
        val: Tensor = x.meta["val"]
        keeps = BATCH_AXES if user.meta.get("region") in COMPUTE else frozenset()
        axes = self.versions[x][0].sharding.axes
        placed = bool(axes) and bool(self._weight(x))
        if placed:
            keeps = frozenset(axes)
        return Offer(
            tuple(int(n) for n in val.shape),
            tuple(v.sharding for v in self.versions[x]),
            self.plan.spread.of(x),
            keeps,
            len(x.users),
            placed,
        )

    def _refuse_gathered_weight(
        self, x: fx.Node, target: Sharding, node: fx.Node, rule: Rule
    ) -> None:
        """A `place` that an op cannot take would be undone at every step, in silence."""
        name = self._weight(x)
        pattern = self.plan.patterns.get(name)
        lost = self.versions[x][0].sharding.axes - target.axes
        if pattern is None or not lost:
            return
        raise ShardingError(
            f'{op_name(node)} cannot take "{name}" split over {"+".join(sorted(lost))} '
            f"as {self.plan.compute[name]}",
            at=quoted(node.meta.get("forward_source") or node.meta.get("source") or ""),
            why=f'place["{pattern}"]; the op splits as "{rule}" ("!" and "1" stay whole)',
            fix="place another dim of it, or leave it out: a weight without a place follows the rest",
        )

    def _weight(self, x: fx.Node) -> str:
        """The weight that `x` is as the forward or backward sees it, or only another view of; or ""."""
        kind = self.plan.boundaries.get(x)
        if kind is not None:
            return kind.parameter
        rule = self.plan.spread.rule(x) if is_tensor_call(x) else None
        moved = rule is not None and (rule.structural or x.target is aten._to_copy.default)
        return self._weight(operands_of(x)[0]) if moved and len(operands_of(x)) == 1 else ""

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
                tuple(int(n) for n in r.shape),
                self.plan.spread.of(users[i]) if i in users else None,
            )
            for i, r in enumerate(results_of(node))
        ]

    def _whole_rule(self, node: fx.Node) -> Rule:
        """No rule: every operand whole, every result whole; said once, or refused."""
        operands = operands_of(node)
        split = [x for x in operands if not self.versions[x][0].sharding.is_whole]
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
                    stacklevel=2,
                )
            self.program.fallbacks.append(text)
        return Rule(
            tuple(((),) * x.meta["val"].ndim for x in operands),
            tuple(() if r is None else ((),) * r.ndim for r in results_of(node)),
            {},
        )

    def _reshard(
        self, x: fx.Node, target: Sharding, user: fx.Node, *, fresh: bool = False
    ) -> fx.Node:
        """The local node of `x` lying as `target`; made at most once, and every stop on the way is kept.

        `fresh` starts from the first version and keeps nothing: a weight gathered for the forward is not
        held for the backward.
        """
        versions = self.versions[x][:1] if fresh else self.versions[x]
        for version in versions:
            if version.sharding == target:
                return version.node
        if self._cost(x, target) >= LATENCY:
            self._work_out_whole(x)
            through = None if fresh else self._through_view(x, target, user)
            if through is not None:
                return through
        versions = self.versions[x][:1] if fresh else self.versions[x]
        best = min(versions, key=lambda v: route(v.sharding, target, self.mesh).cost)
        node, mover = best.node, Mover(self.local, x, user)
        for step in route(best.sharding, target, self.mesh).steps:
            node = mover.move(node, step)
            self.program.made.append((x, node, step.result))
            if not fresh:
                self.versions[x].append(_Version(step.result, node))
        return node

    def _through_view(self, x: fx.Node, target: Sharding, user: fx.Node) -> fx.Node | None:
        """Reshard what `x` is a view of, and view that: all views of one value share its reshards."""
        if x.target not in (aten.reshape.default, aten.permute.default):
            return None
        rule, viewed = self.plan.spread.rule(x), operands_of(x)[0]
        assert rule is not None
        assigned = read(rule, [(rule.results[0], target)], self.mesh)
        shape = tuple(x.meta["val"].shape)
        if project(rule.results[0], assigned, rule, shape, self.mesh).dims != target.dims:
            return None
        shape = tuple(viewed.meta["val"].shape)
        needed = project(rule.operands[0], assigned, rule, shape, self.mesh)
        needed = needed.with_partial(target.partial)
        if self._cost(viewed, needed) > self._cost(x, target):
            return None
        source = self._reshard(viewed, needed, user)
        choice = Choice(assigned, (needed,), (target,), 0.0)
        call = Call(self.local, x, choice, [source], self.scalars.__getitem__)
        made = emit_local(self.local, x, rule, call)
        made.meta["sharding"] = target
        self.versions[x].append(_Version(target, made))
        self.program.made.append((x, made, target))
        return made

    def _cost(self, x: fx.Node, target: Sharding) -> float:
        return min(route(v.sharding, target, self.mesh).cost for v in self.versions[x])

    def _work_out_whole(self, x: fx.Node, depth: int = 4) -> bool:
        """Make `x` whole without communication, where all that it depends on is whole and cheap to redo.

        Masks and positions made from the batch: each rank has the batch, so it need not ask for them.
        """
        if any(v.sharding.is_whole for v in self.versions.get(x, ())):
            return True
        rule = self.plan.spread.rule(x) if is_tensor_call(x) else None
        if rule is None or x.target is boundary or rule.reduced(0) or depth == 0:
            return False
        operands = operands_of(x)
        if not isinstance(x.meta["val"], Tensor) or x.meta["val"].is_floating_point():
            return False
        if not all(self._work_out_whole(o, depth - 1) for o in operands):
            return False
        whole = [Sharding.whole(o.meta["val"].shape) for o in operands]
        choice = Choice({}, tuple(whole), (Sharding.whole(x.meta["val"].shape),), 0.0)
        locals_ = [self._reshard(o, w, x) for o, w in zip(operands, whole, strict=True)]
        call = Call(self.local, x, choice, locals_, self.scalars.__getitem__)
        made = emit_local(self.local, x, rule, call)
        self.versions[x].append(_Version(choice.results[0], made))
        return True

    def _output(self, node: fx.Node) -> None:
        both: Any = node.args[0]
        returned, updates = both
        out = [self._returned(x, node) for x in returned]
        new = [
            self._reshard(x, self.plan.storage[name], node)
            for x, name in zip(updates, self.captured.updated, strict=True)
        ]
        self.local.graph.output((out, new))

    def _returned(self, x: Any, node: fx.Node) -> Any:
        if not isinstance(x, fx.Node):
            return x
        if not isinstance(x.meta["val"], Tensor):
            return self.scalars[x]
        return self._reshard(x, Sharding.whole(x.meta["val"].shape), node)
