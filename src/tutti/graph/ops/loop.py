"""A loop over micro-batches as one node of a graph: `loop(body, [values...])` -> its results.

    before   what the micro-batches have in common          once a step
    loop     parts of the forward and the backward          once a micro-batch, in the order of a row
    after    clipping, update, what the step returns        once a step

A *part* is a graph of its own. What a part makes is kept, by (stage, micro-batch), until the last action
that reads it; what is to be summed over the micro-batches is added up as it comes. Two parts of a stage stand
outside of its micro-batches: `G` gathers its weights, which are kept until the last action that reads them,
or the last one before they are gathered again; `A` reduces, over ranks, what has been added up.
Where the stages of a pipeline lie on several ranks, the row says also what is sent and received, and when.

`playing.play` goes through a row for whatever runs the parts: real ranks (`execution.loops`) and virtual ones
(`graph.players.virtual_ranks`) share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

SEND, RECEIVE = ">", "<"
GATHER, REDUCE = "G", "A"
# What a stage has gathered is kept as if it belonged to this micro-batch.
WHOLE = -1


@dataclass(frozen=True)
class Do:
    """One entry of a row: a part of `stage`, or a message to or from stage `other`.

    A part is `F`, `I`, `W` or `B` of a micro-batch, or `G` or `A` of none.
    A message is what `kind` of the sending stage has made: `Do("F", 0, 3, SEND, 1)`.
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

    `adding` is the same for later micro-batches: it takes the totals so far of the first `num_added` of
    `summed` behind its inputs, adds to them in place, and returns `(outputs, the other summed)`.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    summed: tuple[str, ...] = ()
    adding: fx.Graph | None = None
    num_added: int = 0


@dataclass(frozen=True)
class Sum:
    """What becomes of a value over the micro-batches.

    `op` is "sum", "max", "min", "prod", or "join" along `dim` (seen as `(outer, inner)`).
    """

    name: str
    op: str
    dim: int = 0
    outer: int = 1


@dataclass(frozen=True)
class Body:
    """What one rank does over all micro-batches.

    given: the names of the values from before the loop, in the order of the node's operands.
    sums: what becomes of the values that parts give out to be summed.
    results: the names of what the node returns, in order: of sums, and of what is reduced of them.
    messages: by (sending stage, kind, receiving stage) the names of what goes there.
    vals: a fake of each value that travels; sources: the user's line that made it.
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

    def graphs(self) -> Iterator[fx.Graph]:
        """The graph of every part."""
        for part in self.parts.values():
            yield part.graph
            if part.adding is not None:
                yield part.adding

    def with_graphs(self, change: Callable[[str, fx.Graph], fx.Graph]) -> Body:
        """This body with the graphs of every part replaced, by the part's kind and the graph."""

        def changed(kind: str, part: LoopPart) -> LoopPart:
            adding = None if part.adding is None else change(kind, part.adding)
            return replace(part, graph=change(kind, part.graph), adding=adding)

        return replace(self, parts={k: changed(k[1], p) for k, p in self.parts.items()})

    def with_parts(self, change: Callable[[LoopPart], LoopPart]) -> Body:
        """This body with every part replaced."""
        return replace(self, parts={k: change(p) for k, p in self.parts.items()})

    def source_of(self, stage: int, kind: str, other: int) -> str:
        """The user's line that made the first value of a message which has one; or ""."""
        names = self.messages.get((stage, kind, other), ())
        return next(filter(None, (self.sources.get(n, "") for n in names)), "")

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages whose parts this rank runs."""
        return frozenset(stage for stage, _ in self.parts)

    @cached_property
    def last_reads(self) -> list[frozenset[str]]:
        """For each entry of the row the values of its stage and micro-batch that nothing reads after it.

        Those that the stage has gathered are among them; what is gathered again is another value.
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
        """By stage the names of what it gathers."""
        parts = self.parts.items()
        return {stage: frozenset(p.outputs) for (stage, kind), p in parts if kind == GATHER}

    def scope_of(self, do: Do, name: str) -> tuple[int, int]:
        """The stage and the micro-batch that `name` belongs to where `do` reads or makes it."""
        whole = name in self.gathered.get(do.stage, ())
        return do.stage, WHOLE if whole else do.micro

    def _reads(self, do: Do) -> tuple[str, ...]:
        """What an entry reads of its own stage's values."""
        if do.way == RECEIVE:
            return ()
        if do.way == SEND:
            return self.messages.get((do.stage, do.kind, do.other), ())
        near = (n for key, names in self._near(do) for n in names)
        return (*self.parts[do.stage, do.kind].inputs, *near)

    def _near(self, do: Do) -> Iterator[tuple[int, tuple[str, ...]]]:
        """What goes from this part to other stages of the same rank."""
        for (stage, kind, other), names in self.messages.items():
            if (stage, kind) == (do.stage, do.kind) and other in self.stages:
                yield other, names

    @cached_property
    def near(self) -> dict[tuple[int, str], list[tuple[int, tuple[str, ...]]]]:
        """By stage and kind what its part hands to other stages of this rank."""
        return {k: list(self._near(Do(k[1], k[0], 0))) for k in self.parts}


def loop(*_args: Any) -> Any:
    """The name of a loop in a graph; whoever runs the graph calls `playing.play`."""
    raise AssertionError("loop is a name in a graph; `playing.play` runs it")


def post(x: Tensor, name: str) -> None:
    """In a part, gives `x`, the output `name`, to whoever sends it, before the part has ended.

    Whoever runs the part may leave it out: it is sent at its entry of the row then.
    """


def graphs_of(graph: fx.Graph) -> Iterator[fx.Graph]:
    """`graph`, and the graphs of the parts of its loops."""
    yield graph
    for node in graph.nodes:
        if node.target is loop:
            yield from node.args[0].graphs()
