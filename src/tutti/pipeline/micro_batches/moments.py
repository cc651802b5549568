"""The moment of each node of a program: before the micro-batches, once in each, or after them.

A program split over the axis `micro` treats micro-batches as ranks. Here they become moments of one rank:

    all_reduce(x, micro)       add up x over the micro-batches
    all_gather(x, micro)       join x of all micro-batches
    shard(x, micro)            this micro-batch's part of x

A node that depends on a sum over micro-batches runs after the last of them. So a value of one micro-batch
that needs such a sum couples the samples of the batch, and is refused. A sum that depends on inputs alone (a
count of valid tokens) is computed first, over the whole batch; so is one that also reads buffers (class
weights), if the micro-batches need it.

Without micro-batches (`micro=1`, for a pipeline) there is one moment, the forward and the backward on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tutti.errors import ShardingError
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.order import ancestors
from tutti.graph.analysis.state import is_state
from tutti.graph.edits.edit import NOTES, source_of
from tutti.graph.ops import collectives
from tutti.layout import Layout, Sharding
from tutti.partition.partition import WITHOUT_RULE
from tutti.pipeline.micro_batches.complete_terms import add_complete_terms_once
from tutti.pipeline.micro_batches.coupled_samples import coupling
from tutti.pipeline.micro_batches.over_time import MICRO, sums_over_time, take_apart
from tutti.pipeline.micro_batches.second_passes import (
    computing_reader,
    in_words,
    reader_of_update,
    reads_new_weights,
    second_pass,
)
from tutti.user_lines import quoted

aten = torch.ops.aten
BEFORE, DURING, AFTER = "before", "during", "after"
# From this level of `zero` on a rank sums its part of the gradients, below it whole ones.
GRADIENTS_FROM = 2


@dataclass
class Moments:
    """The moment of each node of `graph`, and the nodes that sum or join over the micro-batches.

    `early` are the sums that depend only on inputs, or on values equal in every micro-batch, in levels: a
    level may read those above it.
    """

    graph: fx.Graph
    when: dict[fx.Node, str] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)
    early: list[list[fx.Node]] = field(default_factory=list)
    stateful: set[fx.Node] = field(default_factory=set)

    def forget(self, node: fx.Node) -> None:
        """Forget `node`, erased from the graph."""
        self.when.pop(node, None)
        self.stateful.discard(node)
        if node in self.sums:
            self.sums.remove(node)

    def during(self) -> list[fx.Node]:
        """The nodes that run once a micro-batch, in order."""
        return [n for n in self.graph.nodes if self.when[n] == DURING]


def moments_of(graph: fx.Graph, num_micro: int, layout: Layout) -> Moments:
    """Rewrite `graph` so that only sums and joins leave a micro-batch, and sort it.

    Raises `ShardingError` for a step that couples the samples of a batch.
    """
    if num_micro == 1:
        _mark_ends(graph)
    else:
        for node in list(graph.nodes):
            take_apart(node, layout)
        add_complete_terms_once(graph)
    linear = _linear_in_parts if layout.zero >= GRADIENTS_FROM else is_linear
    while sum(_sooner(graph, node, linear) for node in reversed(list(graph.nodes))):
        pass
    _once(graph)
    ahead: set[fx.Node] = set()
    while True:
        try:
            return _Sorter(graph, num_micro, layout, ahead).sort()
        except _NeededBefore as needed:
            ahead.add(needed.total)


class _NeededBefore(Exception):
    """A micro-batch needs the sum `total`, which can be computed before."""

    def __init__(self, total: fx.Node) -> None:
        super().__init__(total.name)
        self.total = total


def _once(graph: fx.Graph) -> None:
    """Sum each value once, for all readers."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if sums_over_time(node):
            first = seen.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _mark_ends(graph: fx.Graph) -> None:
    """With one micro-batch: make a value that the update or the caller reads a sum of one."""
    reads_batch = _dependents(graph, lambda n: n.meta.get("kind") == "batch" or is_draw(n))
    inside = {n for n in reads_batch if n.meta.get("region") in ("forward", "backward")}
    inside = {n for n in inside if isinstance(n.meta.get("val"), Tensor)}
    for node in reversed(graph.nodes):
        # A collective has the region of its first reader, whose readers may precede that one.
        if node.target in collectives.PLAYED and inside.intersection(node.users):
            inside.update({node} & reads_batch)
    numbers = _numbers_inside(graph, inside, reads_batch)
    _compute_apart(graph, inside, numbers)
    for node in list(graph.nodes):
        if node not in inside:
            continue
        outside = [u for u in node.users if u not in inside and u not in numbers]
        if not outside:
            continue
        with graph.inserting_after(node):
            end = graph.call_function(collectives.all_reduce, (node, (MICRO,), "sum"))
        end.meta = dict(node.meta)
        for user in outside:
            user.replace_input_with(node, end)


def _numbers_inside(
    graph: fx.Graph, inside: set[fx.Node], reads_batch: set[fx.Node]
) -> set[fx.Node]:
    """The numbers, and results of several tensors, with which the micro-batch computes."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        by_itself = node.op == "call_function" and node.meta.get("region") in (
            "forward",
            "backward",
        )
        is_number = by_itself and not isinstance(node.meta.get("val"), Tensor)
        if is_number and node in reads_batch and any(u in inside or u in found for u in node.users):
            found.add(node)
    return found


def _compute_apart(graph: fx.Graph, inside: set[fx.Node], numbers: set[fx.Node]) -> None:
    """Compute numbers that are also read outside of the micro-batch again, outside."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n in numbers]:
        with graph.inserting_after(node):
            copies[node] = graph.node_copy(node, lambda x: copies.get(x, x))
    for node, copy in copies.items():
        for user in [u for u in node.users if u not in inside and u not in numbers]:
            if user not in copies.values():
                user.replace_input_with(node, copy)
    for copy in reversed(copies.values()):
        if not copy.users:
            graph.erase_node(copy)


def _dependents(graph: fx.Graph, starts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if starts(node) or any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _sooner(graph: fx.Graph, node: fx.Node, linear: Callable[[fx.Node], bool]) -> bool:
    """Sum before a linear op instead of after it: the op then runs once, after the micro-batches.

    sum(transpose(x))  ->  transpose(sum(x))        sum(all_reduce(x, data))  ->  all_reduce(sum(x), data)
    """
    if not sums_over_time(node) or node.args[2:] != ("sum",):
        return False
    made: Any = node.args[0]
    if len(made.users) != 1 or made.op != "call_function":
        return False
    if not linear(made):
        return False
    x: Any = made.args[0]
    with graph.inserting_before(made):
        total = graph.call_function(collectives.all_reduce, (x, (MICRO,), "sum"))
    total.meta = {**{k: made.meta[k] for k in NOTES if k in made.meta}, "val": x.meta["val"]}
    if "sharding" in x.meta:
        sharding = x.meta["sharding"]
        rest = [p for p in sharding.partial if p[0] != MICRO]
        total.meta["sharding"] = sharding.with_partial(rest)
    made.replace_input_with(x, total)
    made.meta = {**made.meta, **{k: node.meta[k] for k in ("sharding",) if k in node.meta}}
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


_MOVES = (collectives.all_reduce, collectives.reduce_scatter)


def is_linear(node: fx.Node) -> bool:
    """Whether a sum may precede `node`, at no more cost."""
    if node.target in _MOVES:
        return node.args[-1] == "sum" and MICRO not in collectives.axes_of(node)
    return node.target in (aten.permute.default, aten.reshape.default)


def _linear_in_parts(node: fx.Node) -> bool:
    """The same if no rank may hold whole gradients: it cuts them before the sum."""
    return node.target is not collectives.reduce_scatter and is_linear(node)


class _Sorter:
    """Sorts a graph; `ahead` are sums that read state, and that the micro-batches need."""

    def __init__(
        self, graph: fx.Graph, num_micro: int, layout: Layout, ahead: Collection[fx.Node]
    ) -> None:
        self.moments = Moments(graph)
        self.num_micro, self.layout, self.ahead = num_micro, layout, ahead
        self.level: dict[fx.Node, int] = {}

    def sort(self) -> Moments:
        made = self.moments
        for node in made.graph.nodes:
            inputs = node.all_input_nodes
            if is_state(node) or any(x in made.stateful for x in inputs):
                made.stateful.add(node)
            made.when[node] = self._when(node)
        for node in reversed(made.graph.nodes):
            if self._may_wait(node):
                made.when[node] = AFTER
        return made

    def _may_wait(self, node: fx.Node) -> bool:
        """Whether only the update or the caller reads a value of state alone, which would stay during the
        micro-batches."""
        made = self.moments
        early = made.when[node] == BEFORE and node.op == "call_function"
        read_late = all(made.when[u] == AFTER for u in node.users)
        return early and read_late and not sums_over_time(node)

    def _when(self, node: fx.Node) -> str:
        made, inputs = self.moments, node.all_input_nodes
        times = {made.when[x] for x in inputs}
        if node.op == "output":
            return AFTER
        if sums_over_time(node):
            return self._summed(node)
        if AFTER in times:
            if DURING in times or _in_time(node):
                self._refuse(node, next(x for x in inputs if made.when[x] == AFTER))
            return AFTER
        if DURING in times or _in_time(node) or (self.num_micro == 1 and self._starts(node)):
            return DURING
        return BEFORE

    def _starts(self, node: fx.Node) -> bool:
        """Whether a node begins the only micro-batch: it reads the batch or draws numbers."""
        reads = any(x.meta.get("kind") == "batch" for x in node.all_input_nodes)
        inside = node.meta.get("region") in ("forward", "backward")
        return inside and (reads or is_draw(node))

    def _summed(self, node: fx.Node) -> str:
        made = self.moments
        source: Any = node.args[0]
        if made.when[source] == AFTER:
            self._refuse(node, source)
        # A value equal in every micro-batch needs no sum.
        waits = source in made.stateful and node not in self.ahead
        if made.when[source] == DURING and (waits or self.num_micro == 1):
            made.sums.append(node)
            return AFTER
        level = 1 + max((self.level.get(x, -1) for x in ancestors([source])), default=-1)
        self.level[node] = level
        while len(made.early) <= level:
            made.early.append([])
        made.early[level].append(node)
        return BEFORE

    def _may_precede(self, total: fx.Node) -> bool:
        """Whether a sum needs no pass through the model: the class weights of the batch's labels."""
        if self.num_micro == 1 or total not in self.moments.sums or total in self.ahead:
            return False
        read = ancestors([total])
        return not any(n.meta.get("kind") in ("parameter", "slot") for n in read)

    def _refuse(self, node: fx.Node, summed: fx.Node) -> None:
        """Name the op that needs all samples at once, not its sum."""
        read = summed
        while self.moments.when.get(summed) == AFTER and not sums_over_time(summed):
            summed = next(x for x in summed.all_input_nodes if self.moments.when[x] == AFTER)
        if self._may_precede(summed):
            raise _NeededBefore(summed)
        coupled = computing_reader(summed.meta.get("user") or node)
        reader = reader_of_update([node]) or (node if reads_new_weights(node, read) else None)
        if reader is not None or self.num_micro == 1:
            raise second_pass(reader or coupled, self.num_micro)
        op, at = in_words(coupled), quoted(source_of(coupled))
        if coupled.meta.get(WITHOUT_RULE):
            raise ShardingError(
                f"micro={self.num_micro} cannot split the batch in time: no rule says how {op} may be split",
                at=at,
                why="it reads its operands whole, which would be known only after the last micro-batch",
                fix=f'leave micro={self.num_micro} out, or tutti.rule("namespace::op", "m k, n k -> m n")',
            )
        raise coupling(coupled, summed, op, at, self.num_micro)


def _in_time(node: fx.Node) -> bool:
    """Whether `node` differs between micro-batches."""
    if node.op != "call_function":
        return False
    if node.target is collectives.positions:
        return _names_micro(node.args[0])
    if is_draw(node):
        return len(node.args) > 6 and _names_micro(node.args[6])
    return node.target in collectives.PLAYED and MICRO in collectives.axes_of(node)


def _names_micro(text: Any) -> bool:
    return MICRO in Sharding.parse(str(text)).axes
