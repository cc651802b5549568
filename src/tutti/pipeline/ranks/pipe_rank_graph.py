"""The graph of one pipeline rank, with its loop as one node."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import Body, Do, Sum, loop
from tutti.pipeline.micro_batches.moments import Moments
from tutti.pipeline.ranks.pipe_ranks import PipelinePlan, bundles
from tutti.pipeline.stages.stage_parts import early_part


class PipeRankGraph:
    """Writes the graph of one pipeline rank.

    Args:
        updated: the names of the state that the step updates, at any pipeline rank.
        owners: the pipeline ranks that keep each state tensor.
        body: the loop of this pipeline rank; `given`, its operands; `made`, its results.
    """

    def __init__(
        self,
        moments: Moments,
        plan: PipelinePlan,
        pipe_rank: int,
        *,
        updated: Sequence[str],
        owners: Mapping[str, frozenset[int]],
        body: Body,
        given: list[fx.Node],
        made: list[fx.Node],
    ) -> None:
        self.moments, self.plan, self.pipe_rank = moments, plan, pipe_rank
        self.updated, self.owners = updated, owners
        self.body, self.given, self.made = body, given, made
        self.graph = fx.Graph()
        self.here: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.Graph:
        """The graph: its inputs and outputs are those of the program that this pipeline rank has."""
        messages = bundles(self.plan.transfers)
        moments, works = self.moments, self.plan.works[self.pipe_rank]
        early = {t for level in moments.early for t in level}
        for node in moments.graph.nodes:
            if node.op == "placeholder":
                self.here[node] = self._input(node)
        steps = {self.plan.position(n): n for n in self.plan.order}
        for at in range(self.plan.end + 1):
            for message in messages:
                if message[0] == at:
                    self._exchange(*message[1:])
            node = steps.get(at)
            if at == self.plan.loop_at:
                self._loop()
            elif node is None or node not in works or node in self.here:
                continue
            elif node in early:
                self._early(node)
            else:
                self.here[node] = self.graph.node_copy(node, self.here.__getitem__)
        self._output()
        return self.graph

    def _input(self, node: fx.Node) -> fx.Node:
        """An input; empty for state that other pipeline ranks keep."""
        here, name = self.graph.node_copy(node), node.meta.get("name")
        if self.pipe_rank not in self.owners.get(name, {self.pipe_rank}):  # type: ignore[arg-type]
            here.meta = {**here.meta, "val": here.meta["val"].new_empty(0)}
        return here

    def _exchange(self, source: int, to: int, nodes: list[fx.Node]) -> None:
        if self.pipe_rank == source:
            xs = [self.here[n] for n in nodes]
            sent = self.graph.call_function(collectives.send, (xs, source, to))
            sent.meta = {"val": None, "source": source_of(nodes[0])}
        elif self.pipe_rank == to:
            likes = [n.meta["val"] for n in nodes]
            args = (source, to, [(tuple(v.shape), v.dtype) for v in likes])
            got = self.graph.call_function(collectives.receive, args)
            got.meta = {"val": likes, "source": source_of(nodes[0])}
            self._items(got, nodes)

    def _items(self, several: fx.Node, nodes: Sequence[fx.Node]) -> None:
        for i, node in enumerate(nodes):
            item = self.graph.call_function(operator.getitem, (several, i))
            item.meta = dict(node.meta)
            item.meta.pop("kind", None)
            self.here[node] = item

    def _loop(self) -> None:
        if self.body.row:
            self._play(self.body, self.given, self.made)

    def _early(self, total: fx.Node) -> None:
        part, given = early_part(self.moments, total)
        num_micro = self.body.num_micro
        row = tuple(Do("F", 0, k) for k in range(num_micro))
        names = tuple(x.name for x in given)
        parts = {(0, "F"): part}
        body = Body(num_micro, parts, row, names, (sum_of(total),), (total.name,))
        self._play(body, given, [total])

    def _play(self, body: Body, given: list[fx.Node], results: list[fx.Node]) -> None:
        args: Any = (body, [self.here[x] for x in given])
        node = self.graph.call_function(loop, args)
        node.meta = {"val": [t.meta["val"] for t in results], "region": "backward"}
        self._items(node, results)

    def _output(self) -> None:
        """All results of the step, and the new values of the state that this pipeline rank keeps."""
        returned, updates = output_of(self.moments.graph)
        mine = [self.pipe_rank in self.owners[n] for n in self.updated]
        self.graph.output(
            (
                fx.map_arg(list(returned), self.here.__getitem__),
                [self.here[x] for x, ok in zip(updates, mine, strict=True) if ok],
            )
        )


def sum_of(total: fx.Node) -> Sum:
    """The reduction of a node that sums or joins over micro-batches."""
    if total.target is collectives.all_reduce:
        return Sum(total.name, str(total.args[2]))
    _, _, dim, outer = total.args
    return Sum(total.name, "join", int(dim), int(outer))  # type: ignore[arg-type]


def output_of(graph: fx.Graph) -> tuple[list[Any], list[fx.Node]]:
    """The results of a program, and its new state."""
    both: Any = graph.output_node().args[0]
    return both
