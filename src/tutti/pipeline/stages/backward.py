"""The stage of each node of the backward: the last one that has its operands.

    forward   x1 = f(x0) | x2 = g(x1)          x1 crosses from stage 0 to stage 1
    backward  stage 1: reads x1, g2 -> g1      stage 0: reads x0, g1 -> g0

A recomputed node belongs to the stage of its original, and its readers to the stage of readers of the
original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import fx

from tutti.graph.edits.edit import RECOMPUTED
from tutti.pipeline.micro_batches.moments import BEFORE, Moments
from tutti.pipeline.stages.recomputed import originals


class Backward:
    """Assigns the nodes `rest` of the backward, given the stages of those of the forward.

    Args:
        free: nodes without a stage.
    """

    def __init__(
        self,
        moments: Moments,
        num_stages: int,
        forward: Sequence[fx.Node],
        rest: Sequence[fx.Node],
        free: set[fx.Node],
    ) -> None:
        self.moments, self.num_stages, self.free = moments, num_stages, free
        self.forward, self.rest = forward, rest
        self.backward, self.in_forward = set(rest), set(forward)
        self.originals = originals(moments.graph)

    def assign(self, stage: dict[fx.Node, int]) -> None:
        """Add the stage of each node of the backward to those of the forward."""
        has = {n: self._stages_with(n, stage) for n in self.forward}
        for node in self.rest:
            original = self.originals.get(node)
            if original in self.in_forward:
                stage[node] = stage[original]
                continue
            inputs = [self.originals.get(x, x) for x in node.all_input_nodes if x not in self.free]
            grads = [stage[x] for x in inputs if x in self.backward]
            limit = min(grads, default=self.num_stages - 1)
            saved = [self._has(x, has, stage) for x in inputs if x not in self.backward]
            saved = [s for s in saved if s is not None]
            common = set(range(limit + 1)).intersection(*saved)
            if common:
                stage[node] = max(common)
            else:
                near = [max((p for p in s if p <= limit), default=limit) for s in saved]
                stage[node] = min(near, default=limit)

    def _stages_with(self, node: fx.Node, stage: Mapping[fx.Node, int]) -> set[int]:
        """The stages that have a value of the forward: the one that makes it and those that read it."""
        return {stage[node], *(stage[u] for u in node.users if u in self.in_forward)}

    def _has(
        self, x: fx.Node, has: Mapping[fx.Node, set[int]], stage: Mapping[fx.Node, int]
    ) -> set[int] | None:
        """The stages that have `x`; None if every stage can."""
        if x in has:
            return has[x]
        if self.moments.when[x] != BEFORE:
            return None
        found = [self.readers[s] for s in self.state_behind(x)]
        allowed = [{stage[r] for r in readers} for readers in found if readers]
        return set.intersection(*allowed) or None if allowed else None

    @cached_property
    def readers(self) -> dict[fx.Node, list[fx.Node]]:
        """The forward nodes that read each state tensor."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.forward:
            for x in node.all_input_nodes:
                for state in self.state_behind(x):
                    found.setdefault(state, []).append(node)
        for node in self.moments.graph.nodes:
            if node.op == "placeholder":
                found.setdefault(node, [])
        return found

    def state_behind(self, x: fx.Node) -> frozenset[fx.Node]:
        """The state tensors on which a value from before the micro-batches depends."""
        if self.moments.when.get(x) != BEFORE or x not in self.moments.stateful:
            return frozenset()
        if x not in self._behind:
            inputs = [self.state_behind(y) for y in x.all_input_nodes]
            own = frozenset({x}) if x.op == "placeholder" else frozenset[fx.Node]()
            self._behind[x] = own.union(*inputs)
        return self._behind[x]

    @cached_property
    def _behind(self) -> dict[fx.Node, frozenset[fx.Node]]:
        return {}


def backward_of(during: list[fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The nodes outside of the forward, and their descendants."""
    found: set[fx.Node] = set()
    for node in during:
        inside = node.meta.get("region", "forward") == "forward" and RECOMPUTED not in node.meta
        if node not in free and (not inside or any(x in found for x in node.all_input_nodes)):
            found.add(node)
    return found
