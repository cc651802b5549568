"""The local nodes of each value of the whole step, and reshards to the sharding that a user needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops.boundary import boundary
from tutti.layout import Sharding
from tutti.partition.choose import Choice
from tutti.partition.localize import Call, Local, emit_local
from tutti.partition.reshard import LATENCY, route
from tutti.partition.wide import Mover
from tutti.propagate.factors import Assignment, project, read
from tutti.propagate.spread import Spread
from tutti.rules import Rule, is_tensor_call, operands_of
from tutti.rules.rule import Term

aten = torch.ops.aten
# They take each version of their base to one of their own, without communication.
_VIEWS = frozenset({aten.reshape.default, aten.permute.default})


@dataclass(frozen=True)
class _Version:
    sharding: Sharding
    node: fx.Node


class Values:
    """The versions of each value: local nodes that hold it in different shardings.

    `made` receives every version, in order; `scalars` gives the local form of a number.
    """

    def __init__(
        self,
        spread: Spread,
        local: Local,
        scalars: dict[fx.Node, Any],
        made: list[tuple[fx.Node, fx.Node, Sharding]],
    ) -> None:
        self.spread, self.local, self.mesh = spread, local, local.mesh
        self.scalars, self.made = scalars, made
        self.versions: dict[fx.Node, list[_Version]] = {}
        # By the rule of a view, a sharding, and whether it is that of the view. A rule has the sizes.
        self._of_views: dict[tuple[Rule, Sharding, bool], Sharding | None] = {}

    def keep(self, node: fx.Node, sharding: Sharding, local: fx.Node) -> None:
        """Make `local` the first version of `node`."""
        self.versions[node] = [_Version(sharding, local)]
        local.meta.setdefault("sharding", sharding)
        self.made.append((node, local, sharding))

    def first(self, node: fx.Node) -> Sharding:
        """The sharding of the first version: that of its op, or the user's."""
        return self.versions[node][0].sharding

    def shardings(self, node: fx.Node) -> tuple[Sharding, ...]:
        """The sharding of each version, the first one first, and of those that views of its base's give."""
        found = [v.sharding for v in self.versions[node]]
        if node.target in _VIEWS:
            for of_base in self.shardings(operands_of(node)[0]):
                sharding = self._viewed(node, of_base)
                if sharding is not None and sharding not in found:
                    found.append(sharding)
        return tuple(found)

    def prefer_last(self, node: fx.Node) -> None:
        """From here on the latest version is the first."""
        self.versions[node].reverse()

    def reshard(
        self, x: fx.Node, target: Sharding, user: fx.Node, *, fresh: bool = False
    ) -> fx.Node:
        """The local node of `x` with sharding `target`; made at most once, with every step of the route kept.

        `fresh` starts from the first version and keeps no steps: the backward does not hold a weight that
        the forward gathers.
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
            self.made.append((x, node, step.result))
            if not fresh:
                self.versions[x].append(_Version(step.result, node))
        return node

    def _through_view(self, x: fx.Node, target: Sharding, user: fx.Node) -> fx.Node | None:
        """Reshard the base of the view `x`, then view that: all views of one value share its reshards."""
        if x.target not in _VIEWS:
            return None
        base, needed = operands_of(x)[0], self._viewed(x, target, of_base=True)
        if needed is None or self._cost(base, needed) > self._cost(x, target):
            return None
        rule = self.spread.rule(x)
        assert rule is not None
        source = self.reshard(base, needed, user)
        assigned = read(rule, [(rule.results[0], target)], self.mesh)
        choice = Choice(assigned, (needed,), (target,), 0.0)
        call = Call(self.local, x, choice, [source], self.scalars.__getitem__)
        made = emit_local(self.local, x, rule, call)
        made.meta["sharding"] = target
        self.versions[x].append(_Version(target, made))
        self.made.append((x, made, target))
        return made

    def _viewed(self, x: fx.Node, sharding: Sharding, *, of_base: bool = False) -> Sharding | None:
        """The sharding of the view `x` of its base with this one, or the base's from that of `x`; None if
        it has splits that the view cannot keep."""
        rule = self.spread.rule(x)
        assert rule is not None
        key = rule, sharding, of_base
        if key not in self._of_views:
            self._of_views[key] = self._new_viewed(x, rule, sharding, of_base)
        return self._of_views[key]

    def _new_viewed(
        self, x: fx.Node, rule: Rule, sharding: Sharding, of_base: bool
    ) -> Sharding | None:
        sides = [(rule.operands[0], operands_of(x)[0]), (rule.results[0], x)]
        (term, value), (other_term, other) = sides[::-1] if of_base else sides
        assigned = read(rule, [(term, sharding)], self.mesh)
        if self._projected(rule, term, assigned, value).dims != sharding.dims:
            return None
        found = self._projected(rule, other_term, assigned, other)
        return found.with_partial(sharding.partial)

    def _projected(self, rule: Rule, term: Term, assigned: Assignment, x: fx.Node) -> Sharding:
        return project(term, assigned, rule, tuple(x.meta["val"].shape), self.mesh)

    def _cost(self, x: fx.Node, target: Sharding) -> float:
        return min(route(v.sharding, target, self.mesh).cost for v in self.versions[x])

    def _work_out_whole(self, x: fx.Node, depth: int = 4) -> bool:
        """Make `x` whole without communication, if all its ancestors are whole and cheap to recompute.

        That serves masks and positions of the batch: each rank has the whole batch.
        """
        if any(v.sharding.is_whole for v in self.versions.get(x, ())):
            return True
        rule = self.spread.rule(x) if is_tensor_call(x) else None
        if rule is None or x.target is boundary or rule.reduced(0) or depth == 0:
            return False
        operands = operands_of(x)
        if not isinstance(x.meta["val"], Tensor) or x.meta["val"].is_floating_point():
            return False
        if not all(self._work_out_whole(o, depth - 1) for o in operands):
            return False
        whole = [Sharding.whole(o.meta["val"].shape) for o in operands]
        choice = Choice({}, tuple(whole), (Sharding.whole(x.meta["val"].shape),), 0.0)
        locals_ = [self.reshard(o, w, x) for o, w in zip(operands, whole, strict=True)]
        call = Call(self.local, x, choice, locals_, self.scalars.__getitem__)
        made = emit_local(self.local, x, rule, call)
        self.versions[x].append(_Version(choice.results[0], made))
        return True
