"""The stage of each node of the backward: the last one that has its operands.

    forward   x1 = f(x0) | x2 = g(x1)          x1 crosses from stage 0 to stage 1
    backward  stage 1: reads x1, g2 -> g1      stage 0: reads x0, g1 -> g0

A recomputed node belongs to the stage of its original, and its readers to the stage of readers of the
original. A node that reads one gradient alone belongs to the stage of its readers, so that the gradient
crosses once: a view, a cast, a gather. One that makes it smaller follows only where the gradient crosses in
any case. The gradient of a bias, which nothing else of the backward reads, belongs to the stage of the other
readers of its operand.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, fx

from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.edits.edit import RECOMPUTED
from tutti.pipeline.micro_batches.moments import BEFORE, Moments
from tutti.pipeline.stages.recomputed import originals


@dataclass(frozen=True)
class _Row:
    """A node of the backward, and what its stage depends on.

    original: the node of the forward that it recomputes. gradients: its operands of the backward. saved:
    those of the forward. states: for each operand from before the micro-batches the readers of each state
    tensor.
    """

    node: fx.Node
    original: fx.Node | None
    gradients: Sequence[fx.Node] = ()
    saved: Sequence[fx.Node] = ()
    states: Sequence[Sequence[Sequence[fx.Node]]] = ()


@dataclass(frozen=True)
class _Led:
    """What the stage of a node follows from that reads one gradient alone.

    readers: of the node; of the gradient if the node has none. shrinks: the node has fewer bytes than the
    gradient. beside: then the gradient's readers with a stage of their own.
    """

    readers: Sequence[fx.Node]
    shrinks: bool = False
    beside: Sequence[fx.Node] = ()


class Backward:
    """Assigns the nodes `rest` of the backward, given the stages of those of the forward.

    Args:
        free: nodes without a stage.
    """

    def __init__(
        self,
        moments: Moments,
        forward: Sequence[fx.Node],
        rest: Sequence[fx.Node],
        free: set[fx.Node],
    ) -> None:
        self.moments, self.free = moments, free
        self.forward, self.rest = forward, rest
        self.backward, self.in_forward = set(rest), set(forward)
        self.originals = originals(moments.graph)

    def assign(self, stage: dict[fx.Node, int]) -> None:
        """Add the stage of each node of the backward to those of the forward.

        A set of stages is an int with a bit for each: many cuts are tried for one step.
        """
        has = {n: self._stages_of(readers, stage) for n, readers in self._uses}
        last = max(stage.values(), default=0)
        every = (1 << (last + 1)) - 1
        for row in self._rows:
            if row.original is not None:
                stage[row.node] = stage[row.original]
                continue
            limit = min((stage[x] for x in row.gradients), default=last)
            saved = [has[x] for x in row.saved]
            for states in row.states:
                allowed = every
                for readers in states:
                    allowed &= self._stages_of(readers, stage)
                if allowed:
                    saved.append(allowed)
            common = below = (1 << (limit + 1)) - 1
            for one in saved:
                common &= one
            if common:
                stage[row.node] = _highest(common)
            else:
                near = [_highest(one & below) if one & below else limit for one in saved]
                stage[row.node] = min(near, default=limit)
        for node, led in self._led.items():
            stage[node] = max(stage[x] for x in led.readers)
            if led.shrinks and all(stage[x] > stage[node] for x in led.beside):
                stage[node] = stage[self._root(node)]  # less to send

    def _stages_of(self, nodes: Sequence[fx.Node], stage: Mapping[fx.Node, int]) -> int:
        found = 0
        for node in nodes:
            found |= 1 << stage[node]
        return found

    @cached_property
    def _uses(self) -> list[tuple[fx.Node, list[fx.Node]]]:
        """For each node of the forward those that have its value: itself and its readers there."""
        return [(n, [n, *(u for u in n.users if u in self.in_forward)]) for n in self.forward]

    @cached_property
    def _rows(self) -> list[_Row]:
        """Of the nodes that follow no other."""
        rows = [row for node, row in self._every_row.items() if node not in self._led]
        return [replace(row, gradients=[self._root(x) for x in row.gradients]) for row in rows]

    @cached_property
    def _every_row(self) -> dict[fx.Node, _Row]:
        return {node: self._row(node) for node in self.rest}

    @cached_property
    def _led(self) -> dict[fx.Node, _Led]:
        """The nodes that follow others, after these."""
        found: dict[fx.Node, _Led] = {}
        # Nodes that nothing else of the backward reads, and their operands.
        ends: dict[fx.Node, fx.Node] = {}
        for node in filter(self._reads_one_gradient, reversed(self.rest)):
            (operand,) = node.all_input_nodes
            readers = self._readers(node, ends)
            if not readers:
                ends[node] = operand
            elif all(x in found or self._reads_forward(x) for x in readers):
                found[node] = _Led(readers, nbytes_of(node) < nbytes_of(operand))
        for node, operand in ends.items():
            while operand in ends:
                operand = ends[operand]
            found[node] = _Led(self._readers(operand, ends) or [operand])
        for node, led in found.items():
            if led.shrinks:
                (operand,) = node.all_input_nodes
                beside = [x for x in self._readers(operand, ends) if x not in found]
                found[node] = replace(led, beside=beside)
        return found

    def _readers(self, node: fx.Node, ends: Container[fx.Node]) -> list[fx.Node]:
        return [u for u in node.users if u in self.backward and u not in ends]

    def _reads_forward(self, node: fx.Node) -> bool:
        """Whether it reads values of the forward or of state, or what is made of these alone, such as a
        transpose: a sum of gradients does not."""
        row = self._every_row[node]
        return bool(row.saved or row.states) or any(x in self._of_forward for x in row.gradients)

    @cached_property
    def _of_forward(self) -> set[fx.Node]:
        """The nodes of the backward that read no gradient."""
        found: set[fx.Node] = set()
        for node, row in self._every_row.items():
            reads = row.saved or row.states or row.gradients
            if reads and row.original is None and found.issuperset(row.gradients):
                found.add(node)
        return found

    def _reads_one_gradient(self, node: fx.Node) -> bool:
        """Whether that is all that it reads, and its result is one tensor of its own."""
        if node.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor):
            return False
        row = self._every_row[node]
        alone = row.original is None and not row.saved and not row.states
        return alone and len(node.all_input_nodes) == len(row.gradients) == 1

    def _root(self, x: fx.Node) -> fx.Node:
        """The gradient from which nodes that follow others make `x`."""
        while x in self._led:
            (x,) = x.all_input_nodes
        return x

    def _row(self, node: fx.Node) -> _Row:
        original = self.originals.get(node)
        if original in self.in_forward:
            return _Row(node, original)
        inputs = [self.originals.get(x, x) for x in node.all_input_nodes if x not in self.free]
        gradients = [x for x in inputs if x in self.backward]
        others = [x for x in inputs if x not in self.backward]
        before = (x for x in others if x not in self.in_forward)
        states = [self._readers_of(x) for x in before if self.moments.when[x] == BEFORE]
        saved = [x for x in others if x in self.in_forward]
        return _Row(node, None, gradients, saved, [one for one in states if one])

    def _readers_of(self, x: fx.Node) -> list[list[fx.Node]]:
        """The forward's readers of each state tensor behind `x`, of those with readers."""
        return [self.readers[s] for s in self.state_behind(x) if self.readers[s]]

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


def _highest(stages: int) -> int:
    return stages.bit_length() - 1


def backward_of(during: list[fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The nodes outside of the forward, and their descendants."""
    found: set[fx.Node] = set()
    for node in during:
        inside = node.meta.get("region", "forward") == "forward" and RECOMPUTED not in node.meta
        if node not in free and (not inside or any(x in found for x in node.all_input_nodes)):
            found.add(node)
    return found
