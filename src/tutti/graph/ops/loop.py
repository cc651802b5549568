"""A loop over micro-batches as one node of a graph: `loop(body, [values...])` -> its results.

    before   values common to all micro-batches             once a step
    loop     parts of the forward and the backward          once a micro-batch, in the order of a row
    after    clipping, update, results of the step          once a step

A *part* is a graph of its own. The loop keeps its results, by (stage, micro-batch), until the last action
that reads them, and adds sums over the micro-batches as their terms arrive. Two parts of a stage belong to no
micro-batch: `G` gathers its weights, which the loop keeps until their last reader, or the last one before the
next gather; `A` reduces the sums over ranks. In a pipeline over several ranks the row also has the sends and
receives, in order.

`playing.play` plays a row for real ranks (`execution.loops`) and virtual ones
(`graph.players.virtual_ranks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from torch import Tensor, fx

SEND, RECEIVE = ">", "<"
GATHER, REDUCE = "G", "A"
# The scope of a stage's gathered weights, in place of a micro-batch.
WHOLE = -1


@dataclass(frozen=True)
class Do:
    """One entry of a row: a part of `stage`, or a message to or from stage `other`.

    A part is `F`, `I`, `W` or `B` of a micro-batch, or `G` or `A` of none.
    A message carries results of `kind` of the sending stage: `Do("F", 0, 3, SEND, 1)`.
    """

    kind: str
    stage: int
    micro: int
    way: str = ""
    other: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}"
        text += "" if self.kind in (GATHER, REDUCE) else str(self.micro)
        return f"{text}{self.way}{self.other}" if self.way else text


@dataclass(frozen=True)
class LoopPart:
    """One piece of a body: `graph` takes `inputs` and returns `(outputs, summed)`, all by name.

    `adding` replaces `graph` for later micro-batches: behind its inputs it takes the totals so far of the
    first `num_added` of `summed`, adds to them in place, and returns `(outputs, the other summed)`.

    A part that ends sums takes `totals` behind its inputs, gives them up, and returns `reduced`, new totals
    or their reductions over ranks, behind its outputs.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    summed: tuple[str, ...] = ()
    adding: fx.Graph | None = None
    num_added: int = 0
    totals: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the part makes nothing."""
        return not self.outputs and not self.summed and not self.reduced


@dataclass(frozen=True)
class Sum:
    """The reduction of a value over the micro-batches.

    `op` is "sum", "max", "min", "prod", or "join" along `dim` (seen as `(outer, inner)`).
    """

    name: str
    op: str
    dim: int = 0
    outer: int = 1


@dataclass(frozen=True)
class Body:
    """The work of one rank over all micro-batches.

    given: the names of the values from before the loop, in the order of the node's operands.
    sums: the reductions of the values that parts return as `summed`.
    results: the names of the node's results, in order: sums, and their reductions over ranks.
    messages: the names of the values sent, by (sending stage, kind, receiving stage).
    vals: a fake value of each message's tensors; sources: the user's line that made each.
    last: parts that replace those of the same key in their last entry of the row.
    """

    num_micro: int
    parts: dict[tuple[int, str], LoopPart]
    row: tuple[Do, ...]
    given: tuple[str, ...]
    sums: tuple[Sum, ...]
    results: tuple[str, ...]
    messages: dict[tuple[int, str, int], tuple[str, ...]] = field(default_factory=dict)
    vals: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    last: dict[tuple[int, str], LoopPart] = field(default_factory=dict)

    def every_part(self) -> Iterator[tuple[tuple[int, str], LoopPart]]:
        """Each part with its key, those for last entries behind the others."""
        yield from self.parts.items()
        yield from self.last.items()

    def graphs(self) -> Iterator[fx.Graph]:
        """The graph of every part."""
        for _, part in self.every_part():
            yield part.graph
            if part.adding is not None:
                yield part.adding

    @cached_property
    def played(self) -> list[LoopPart | None]:
        """The part of each entry of the row; None for a message."""
        ends = {(do.stage, do.kind): i for i, do in enumerate(self.row) if not do.way}
        found: list[LoopPart | None] = []
        for i, do in enumerate(self.row):
            key = do.stage, do.kind
            last = self.last.get(key) if ends.get(key) == i else None
            found.append(None if do.way else last or self.parts[key])
        return found

    def sums_of(self, part: LoopPart) -> tuple[str, ...]:
        """The names of the sums of a part, which come before its joins and maxima."""
        ops = {s.name: s.op for s in self.sums}
        return tuple(takewhile(lambda name: ops[name] == "sum", part.summed))

    def with_graphs(self, change: Callable[[str, fx.Graph], fx.Graph]) -> Body:
        """This body with the graphs of every part replaced, by the part's kind and the graph."""

        def changed(kind: str, part: LoopPart) -> LoopPart:
            adding = None if part.adding is None else change(kind, part.adding)
            return replace(part, graph=change(kind, part.graph), adding=adding)

        parts = {k: changed(k[1], p) for k, p in self.parts.items()}
        return replace(self, parts=parts, last={k: changed(k[1], p) for k, p in self.last.items()})

    def with_parts(self, change: Callable[[LoopPart], LoopPart]) -> Body:
        """This body with every part replaced, but for those of last entries."""
        return replace(self, parts={k: change(p) for k, p in self.parts.items()})

    def source_of(self, stage: int, kind: str, other: int) -> str:
        """The first user's line among the values of a message; or ""."""
        names = self.messages.get((stage, kind, other), ())
        return next(filter(None, (self.sources.get(n, "") for n in names)), "")

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages whose parts this rank runs."""
        return frozenset(stage for stage, _ in self.parts)

    @cached_property
    def last_reads(self) -> list[frozenset[str]]:
        """For each entry of the row the values of its stage and micro-batch that it reads last.

        Gathered weights are among them; a second gather makes another value.
        """
        seen: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        found: list[frozenset[str]] = []
        for do in reversed(self.row):
            if do.kind == GATHER:
                seen[do.stage, WHOLE].clear()
            new = {n for n in self._reads(do) if n not in seen[self.scope_of(do, n)]}
            for name in new:
                seen[self.scope_of(do, name)].add(name)
            found.append(frozenset(new))
        return found[::-1]

    @cached_property
    def gathered(self) -> dict[int, frozenset[str]]:
        """The names of gathered weights, by stage."""
        parts = self.parts.items()
        return {stage: frozenset(p.outputs) for (stage, kind), p in parts if kind == GATHER}

    def scope_of(self, do: Do, name: str) -> tuple[int, int]:
        """The stage and the micro-batch that `name` belongs to where `do` reads or makes it."""
        whole = name in self.gathered.get(do.stage, ())
        return do.stage, WHOLE if whole else do.micro

    def _reads(self, do: Do) -> tuple[str, ...]:
        """The values of its own stage that an entry reads."""
        if do.way == RECEIVE:
            return ()
        if do.way == SEND:
            return self.messages.get((do.stage, do.kind, do.other), ())
        near = (n for key, names in self._near(do) for n in names)
        return (*self.parts[do.stage, do.kind].inputs, *near)

    def _near(self, do: Do) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The values that this part passes to other stages of the same rank."""
        for (stage, kind, other), names in self.messages.items():
            if (stage, kind) == (do.stage, do.kind) and other in self.stages:
                yield other, names

    @cached_property
    def near(self) -> dict[tuple[int, str], list[tuple[int, tuple[str, ...]]]]:
        """The values that a part passes to other stages of this rank, by (stage, kind)."""
        return {k: list(self._near(Do(k[1], k[0], 0))) for k in self.parts}


def loop(*_args: Any) -> Any:
    """The name of a loop in a graph; `playing.play` runs it."""
    raise AssertionError("loop is a name in a graph; `playing.play` runs it")


def post(x: Tensor, name: str) -> None:
    """In a part, hand over `x`, the output `name`, to be sent before the part ends.

    An engine may ignore it: the send's entry of the row then sends `x`.
    """


def graphs_of(graph: fx.Graph) -> Iterator[fx.Graph]:
    """`graph`, and the graphs of the parts of its loops."""
    yield graph
    for node in graph.nodes:
        if node.target is loop:
            yield from node.args[0].graphs()
