"""A loop over micro-batches as one node of a graph: `loop(body, [values...])` -> its results.

    before   what the micro-batches have in common          once a step
    loop     parts of the forward and the backward          once a micro-batch, in the order of a row
    after    clipping, update, what the step returns        once a step

A *part* is a graph of its own. What a part makes is kept, by (stage, micro-batch), until the last action
that reads it; what is to be summed over the micro-batches is added up as it comes. Where the stages of a
pipeline lie on several ranks, the row says also what is sent and received, and when.

`play` goes through a row for whatever runs the parts: real ranks (`runtime.timed`) and virtual ones
(`graph.virtual`) share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

SEND, RECEIVE = ">", "<"


@dataclass(frozen=True)
class Do:
    """One entry of a row: a part of `stage` (`F`, `I`, `W`, `B`), or a message to or from stage `other`.

    A message is what `kind` of the sending stage has made: `Do("F", 0, 3, SEND, 1)`.
    """

    kind: str
    stage: int
    micro: int
    way: str = ""
    other: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.micro}"
        return f"{text}{self.way}{self.other}" if self.way else text


@dataclass(frozen=True)
class Part:
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
    messages: by (sending stage, kind, receiving stage) the names of what goes there.
    vals: a fake of each value that travels; sources: the user's line that made it.
    results: what the node returns, in order.
    """

    num_micro: int
    parts: dict[tuple[int, str], Part]
    row: tuple[Do, ...]
    given: tuple[str, ...]
    results: tuple[Sum, ...]
    messages: dict[tuple[int, str, int], tuple[str, ...]] = field(default_factory=dict)
    vals: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def graphs(self) -> Iterator[fx.Graph]:
        """The graph of every part."""
        for part in self.parts.values():
            yield part.graph
            if part.adding is not None:
                yield part.adding

    def with_graphs(self, change: Callable[[fx.Graph], fx.Graph]) -> Body:
        """This body with every part's graphs replaced."""
        return self.with_parts(
            lambda p: replace(
                p, graph=change(p.graph), adding=None if p.adding is None else change(p.adding)
            )
        )

    def with_parts(self, change: Callable[[Part], Part]) -> Body:
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
        """For each entry of the row the values of its stage and micro-batch that nothing reads after it."""
        seen: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        found: list[frozenset[str]] = []
        for do in reversed(self.row):
            at = (do.stage, do.micro)
            new = {n for n in self._reads(do) if n not in seen[at]}
            seen[at] |= new
            found.append(frozenset(new))
        return found[::-1]

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


class Engine(Protocol):
    """What runs the parts of a body: for one rank, or for several virtual ones at once."""

    def call(
        self, part: Part, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        """The part's outputs and what it gives to sums, by its graph `adding` if that is so.

        `inputs` may be emptied.
        """
        ...

    def add(self, total: Any, value: Any, op: str) -> Any:
        """`total` and one value more; `total` may be overwritten."""
        ...

    def join(self, values: list[Any], dim: int, outer: int) -> Any:
        """The values of all micro-batches as one."""
        ...

    def send(self, do: Do, values: list[Any]) -> None:
        """Send what `do` says."""
        ...

    def receive(self, do: Do, likes: list[Tensor]) -> list[Any]:
        """The tensors that `do` waits for, like `likes`."""
        ...


def loop(*_args: Any) -> Any:
    """The name of a loop in a graph; whoever runs the graph calls `play`."""
    raise AssertionError("loop is a name in a graph; `play` runs it")


def play(body: Body, given: Sequence[Any], engine: Engine) -> list[Any]:
    """Go through the row of `body`; returns its results in order."""
    common = dict(zip(body.given, given, strict=True))
    live: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    totals: dict[str, Any] = {}
    ops = {s.name: s.op for s in body.results}
    for do, dying in zip(body.row, body.last_reads, strict=True):
        values = live[do.stage, do.micro]
        if do.way == RECEIVE:
            names = body.messages.get((do.other, do.kind, do.stage), ())
            likes = [body.vals[n] for n in names]
            values.update(zip(names, engine.receive(do, likes), strict=True))
            continue
        if do.way == SEND:
            names = body.messages.get((do.stage, do.kind, do.other), ())
            engine.send(do, [_take(values, n, n in dying) for n in names])
            continue
        part = body.parts[do.stage, do.kind]
        if not part.outputs and not part.summed:
            continue
        handed = {n for _, names in body.near[do.stage, do.kind] for n in names}
        inputs = [
            common[n] if n in common else _take(values, n, n in dying and n not in handed)
            for n in part.inputs
        ]
        added = part.summed[: part.num_added]
        adding = part.adding is not None and all(n in totals for n in added)
        if adding:
            inputs += [totals[n] for n in added]
        outputs, summed = engine.call(part, inputs, do.micro, adding=adding)
        values.update(zip(part.outputs, outputs, strict=True))
        rest = part.summed[part.num_added :] if adding else part.summed
        _gather(totals, rest, summed, ops, engine)
        del outputs, summed, inputs
        for other, names in body.near[do.stage, do.kind]:
            live[other, do.micro].update((n, values[n]) for n in names)
        for name in handed & dying:
            del values[name]
        if not values:
            live.pop((do.stage, do.micro), None)
    return [
        engine.join(totals.pop(s.name), s.dim, s.outer) if s.op == "join" else totals.pop(s.name)
        for s in body.results
    ]


def _take(values: dict[str, Any], name: str, last: bool) -> Any:
    return values.pop(name) if last else values[name]


def _gather(
    totals: dict[str, Any],
    names: Sequence[str],
    values: list[Any],
    ops: Mapping[str, str],
    engine: Engine,
) -> None:
    """Add to the totals; no name of `play` may keep the last value alive during the next part."""
    for name, value in zip(names, values, strict=True):
        if ops[name] == "join":
            totals.setdefault(name, []).append(value)
        elif name in totals:
            totals[name] = engine.add(totals[name], value, ops[name])
        else:
            totals[name] = value


ADD: dict[str, Callable[..., Tensor]] = {
    "sum": torch.Tensor.add_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "prod": torch.Tensor.mul_,
}


def graphs_of(graph: fx.Graph) -> Iterator[fx.Graph]:
    """`graph`, and the graphs of the parts of its loops."""
    yield graph
    for node in graph.nodes:
        if node.target is loop:
            yield from node.args[0].graphs()
