"""The parts of a step that run once a micro-batch: their nodes, and the values that pass between them.

    F   forward of a stage         B   its backward, or in two halves
    I   gradients of the stage's inputs, for which other stages wait
    W   the rest: gradients of its weights

and the parts that run once a step, for all micro-batches:

    G   gathers the stage's weights         A   reduces its gradients over ranks

A step without stages is one part, `B`, forward and backward in one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import roots_of
from tutti.graph.analysis.order import ancestors
from tutti.graph.analysis.state import is_state
from tutti.graph.ops.loop import GATHER, REDUCE, LoopPart
from tutti.pipeline.micro_batches.moments import BEFORE, DURING, Moments
from tutti.pipeline.stages.cut import Stages
from tutti.pipeline.stages.gathers import gather_once, gathered
from tutti.pipeline.stages.stage_reductions import reductions

aten = torch.ops.aten
Key = tuple[int, str]


@dataclass
class Parts:
    """The parts of all stages.

    members: the nodes of each part, in order; free nodes are in each stage that needs them.
    given: the values from before the loop that each part reads.
    messages: the values sent, by (sending stage, kind, receiving stage).
    results: the results of each stage: sums over the micro-batches, or their reductions.
    """

    parts: dict[Key, LoopPart] = field(default_factory=dict)
    members: dict[Key, list[fx.Node]] = field(default_factory=dict)
    given: dict[Key, list[fx.Node]] = field(default_factory=dict)
    messages: dict[tuple[int, str, int], list[fx.Node]] = field(default_factory=dict)
    results: dict[int, list[fx.Node]] = field(default_factory=dict)

    def home_of(self, node: fx.Node) -> Key:
        """The first part that makes `node`."""
        return next(key for key, nodes in self.members.items() if node in nodes)


def parts_of(moments: Moments, stages: Stages, *, halves: bool = False) -> Parts:
    """The parts of each stage; with `halves` the backward in `I` and `W`."""
    return _StagePartsWriter(moments, stages, halves).write()


def early_part(moments: Moments, total: fx.Node) -> tuple[LoopPart, list[fx.Node]]:
    """The part of the early sum `total`, and the values from before that it reads."""
    source: fx.Node = total.args[0]  # type: ignore[assignment]
    nodes = ancestors([source], lambda n: moments.when[n] == DURING)
    given = _read_from_outside(nodes, moments)
    return _part(nodes, given, [], [], [(total, source)]), given


class _StagePartsWriter:
    def __init__(self, moments: Moments, stages: Stages, halves: bool) -> None:
        self.moments, self.stages = moments, stages
        single = stages.num_stages == 1
        self.kinds: tuple[str, ...] = (
            ("B",) if single else ("F", "I", "W") if halves else ("F", "B")
        )
        self.made = Parts()
        self.single = single
        if not single:
            gather_once(moments)
        self.gathered = gathered(moments)
        self.order = {n: i for i, n in enumerate(moments.graph.nodes)}
        self.first: dict[tuple[int, fx.Node], str] = {}  # the part of a stage that makes a value

    def write(self) -> Parts:
        kind_of = self._kinds()
        for stage in range(self.stages.num_stages):
            self._members(stage, kind_of)
        reads = {key: self._reads(key) for key in self.made.members}
        outputs: dict[Key, dict[fx.Node, None]] = {key: {} for key in self.made.members}
        for key, read in reads.items():
            for x in read:
                self._supply(x, key, outputs)
        # In the order in which they are ready.
        for (stage, kind, _), names in self.made.messages.items():
            names.sort(key=lambda x: (self.first[stage, x] != kind, self.order[x]))
        sums: dict[Key, list[tuple[fx.Node, fx.Node]]] = {key: [] for key in self.made.members}
        for total in self.moments.sums:
            source: fx.Node = total.args[0]  # type: ignore[assignment]
            sums[self.made.home_of(source)].append((total, source))
        for made in sums.values():  # sums that allow in-place addition come first
            made.sort(key=lambda pair: pair[0].args[2:] != ("sum",))
        whole: dict[int, dict[fx.Node, None]] = {}
        for key, nodes in self.made.members.items():
            found = _read_from_outside(nodes, self.moments)
            kept = [x for x in found if x in self.gathered]
            given = [x for x in found if x not in self.gathered]
            whole.setdefault(key[0], {}).update(dict.fromkeys(kept))
            made = _part(nodes, given, [*kept, *reads[key]], list(outputs[key]), sums[key])
            self.made.parts[key], self.made.given[key] = made, given
        for stage, kept in whole.items():
            self._gathers(stage, list(kept))
            self._reductions(
                stage, [t for k, made in sums.items() if k[0] == stage for t, _ in made]
            )
        return self.made

    def _gathers(self, stage: int, kept: list[fx.Node]) -> None:
        if kept:
            nodes = ancestors(kept, self.gathered.__contains__)
            given = _read_from_outside(nodes, self.moments)
            self.made.parts[stage, GATHER] = _part(nodes, given, [], kept, [])
            self.made.given[stage, GATHER] = given

    def _reductions(self, stage: int, totals: list[fx.Node]) -> None:
        chains = {} if self.single else reductions(self.moments)
        mine = [t for t in totals if t in chains]
        ends = [chains[t][-1] for t in mine]
        self.made.results[stage] = [t for t in totals if t not in chains] + ends
        if mine:
            nodes = [n for t in mine for n in chains[t]]
            part = _part(nodes, [], mine, ends, [])
            self.made.parts[stage, REDUCE] = LoopPart(
                part.graph, (), (), totals=part.inputs, reduced=part.outputs
            )
            self.made.given[stage, REDUCE] = []

    def _kinds(self) -> dict[fx.Node, str]:
        stage = self.stages.stage
        if self.kinds == ("B",):
            return dict.fromkeys(stage, "B")
        found = {n: "F" if n in self.stages.forward else self.kinds[-1] for n in stage}
        if self.kinds[-1] == "W":
            awaited = [n for n in stage if self._is_awaited(n)]
            for n in ancestors(awaited, lambda n: found.get(n) == "W"):
                if any(stage[n] == stage[a] for a in awaited):
                    found[n] = "I"
            for n in stage:  # values pass between parts one by one, never as several results
                if n.target is operator.getitem and n.args[0] in found:
                    found[n] = found[n.args[0]]  # type: ignore[index]
        return found

    def _is_awaited(self, node: fx.Node) -> bool:
        """Whether the backward of another stage reads this value of this stage's backward."""
        stage = self.stages.stage
        mine = stage[node]
        return node not in self.stages.forward and any(
            stage.get(u, mine) != mine for u in node.users
        )

    def _members(self, stage: int, kind_of: dict[fx.Node, str]) -> None:
        for kind in self.kinds:
            own = [n for n, k in kind_of.items() if k == kind and self.stages.stage[n] == stage]
            if stage == 0 and kind == self.kinds[0]:
                own += [s for t in self.moments.sums if (s := t.args[0]) in self.stages.free]  # type: ignore[misc]
            nodes = ancestors(own, lambda n: n in self.stages.free)
            if self.single:  # each micro-batch gathers a weight at its use
                nodes = ancestors(nodes, self.gathered.__contains__)
            nodes = {n for n in nodes if (stage, n) not in self.first}
            for n in nodes:
                self.first[stage, n] = kind
            self.made.members[stage, kind] = sorted(nodes, key=self.order.__getitem__)

    def _reads(self, key: Key) -> list[fx.Node]:
        """The values of the same micro-batch that a part reads from other parts."""
        own = set(self.made.members[key])
        found = dict.fromkeys(
            x
            for n in self.made.members[key]
            for x in n.all_input_nodes
            if x not in own and self.moments.when[x] == DURING
        )
        return list(found)

    def _supply(self, x: fx.Node, key: Key, outputs: dict[Key, dict[fx.Node, None]]) -> None:
        """Let the part that makes `x` return it, and send it if another stage reads it."""
        stage, kind = key
        near = self.first.get((stage, x))
        if near is not None:
            outputs[stage, near][x] = None
            return
        source = self.stages.stage[x]
        made = self.first[source, x]
        outputs[source, made][x] = None
        # A value of the forward of a later stage arrives with that stage's gradients.
        sent = made if made == "F" and (source < stage or kind == "F") else self.kinds[1]
        names = self.made.messages.setdefault((source, sent, stage), [])
        if x not in names:
            names.append(x)


def _read_from_outside(nodes: Collection[fx.Node], moments: Moments) -> list[fx.Node]:
    own = set(nodes)
    inputs = (x for n in nodes for x in n.all_input_nodes if x not in own)
    return list(dict.fromkeys(x for x in inputs if moments.when[x] == BEFORE))


def _part(
    nodes: Iterable[fx.Node],
    given: list[fx.Node],
    reads: list[fx.Node],
    outputs: list[fx.Node],
    sums: list[tuple[fx.Node, fx.Node]],
) -> LoopPart:
    graph, mapped = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [*given, *reads]
    assert not any(isinstance(x.meta.get("val"), list | tuple) for x in [*inputs, *outputs])
    for x in inputs:
        mapped[x] = graph.placeholder(x.name)
        mapped[x].meta = {k: v for k, v in x.meta.items() if k != "kind" or is_state(x)}
    for node in _in_order(nodes):
        mapped[node] = graph.node_copy(node, mapped.__getitem__)
    given_up = _own_memory(graph, [mapped[x] for x in outputs], [mapped[x] for _, x in sums])
    graph.output(([mapped[x] for x in outputs], given_up))
    return LoopPart(
        graph,
        tuple(x.name for x in inputs),
        tuple(x.name for x in outputs),
        tuple(total.name for total, _ in sums),
    )


def _own_memory(graph: fx.Graph, kept: list[fx.Node], summed: list[fx.Node]) -> list[fx.Node]:
    """`summed`, each in memory of its own: the first one becomes the total, and grows in place.

    Copies views, and values kept for other parts.
    """
    roots = roots_of(graph)
    taken = {roots.get(x) for x in kept}
    found = []
    for x in summed:
        own = x.op == "call_function" and roots.get(x) is x and x not in taken
        taken.add(x)
        if not own:
            copy = graph.call_function(aten.clone.default, (x,))
            copy.meta = dict(x.meta)
            x = copy
        found.append(x)
    return found


def _in_order(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    chosen = set(nodes)
    if chosen:
        yield from (n for n in next(iter(chosen)).graph.nodes if n in chosen)


def fake_of(node: fx.Node) -> Tensor:
    """The fake value of a node in a message."""
    val = node.meta["val"]
    assert isinstance(val, Tensor), f"{node} is no tensor"
    return val
