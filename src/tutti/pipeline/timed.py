"""A program whose batch is split in time: for each place on the axis `pipe` the graph that its ranks run.

    %w  = input                    %w  = input
    %x  = shard(%b, micro)         %l  = loop(body, [%w, %b])     body: x = shard(b, micro) ... g
    ...                       ->   %g  = item(%l, 0)
    %s  = all_reduce(%g, micro)    %w' = adamw(%w, %g)
    %w' = adamw(%w, %s)

The graph keeps the inputs and outputs of the program; passes treat the loop as one op.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tutti.graph import collectives
from tutti.graph.edit import source_of
from tutti.graph.loop import RECEIVE, SEND, Body, Do, Sum, loop
from tutti.partition.partition import Program
from tutti.pipeline.action import Action
from tutti.pipeline.cut import Stages, cut
from tutti.pipeline.moments import AFTER, Moments, moments_of
from tutti.pipeline.parts import Parts, early_part, fake_of, parts_of
from tutti.pipeline.places import Plan, bundles, plan_places
from tutti.pipeline.schedule import Schedule

aten = torch.ops.aten


@dataclass
class Timed:
    """What the ranks at each place run, and where state lives.

    programs: by place; each returns the new values of the state that its place keeps. owners: the places that
    keep each state tensor. schedule: the rows of compute actions.
    """

    programs: list[Program]
    stages: Stages
    owners: dict[str, frozenset[int]]
    schedule: Schedule
    bodies: list[Body] = field(default_factory=list)


def timed(
    program: Program,
    graph: fx.Graph,
    schedule: Schedule,
    *,
    cut_at: Sequence[str] = (),
    homes: Mapping[str, frozenset[int]] | None = None,
) -> Timed:
    """Lower `graph`, the flat graph of `program`, which is changed.

    Args:
        schedule: compute actions only, one row per place.
        cut_at: names of modules at which stages begin.
        homes: where state is kept already.

    Raises:
        ShardingError: the step couples the samples of a batch.
        LayoutError: the step cannot be cut so.
    """
    moments = moments_of(graph, program.layout.micro, program.layout)
    place_of = [schedule.rank_of(s) for s in range(schedule.num_stages)]
    known = _stages_of_homes(homes or {}, place_of)
    stages = cut(moments, schedule.num_stages, names=cut_at, homes=known)
    while sum(_add_apart(moments, stages, total) for total in list(moments.sums)):
        pass
    halves = any(a.kind in "IW" for row in schedule.rows for a in row)
    schedule = _in_halves(schedule) if halves else schedule
    parts = parts_of(moments, stages, halves=halves)
    owners = _owners(program, moments, parts, place_of, homes or {})
    return _Writer(program, moments, stages, parts, owners, schedule).write()


def _in_halves(schedule: Schedule) -> Schedule:
    """Each backward as two actions: a file may have some in one, some in halves."""
    return Schedule(
        tuple(
            tuple(
                Action(kind, a.stage, a.micro)
                for a in row
                for kind in ("IW" if a.kind == "B" else a.kind)
            )
            for row in schedule.rows
        )
    )


def _add_apart(moments: Moments, stages: Stages, total: fx.Node) -> bool:
    """A gradient to which several stages add: each adds its part up, and one addition follows the loop.

    sum(a + b)  ->  sum(a) + sum(b)         so that no stage sends a weight's gradient in every micro-batch
    """
    made: Any = total.args[0]
    if made.target is not aten.add.Tensor or len(made.users) != 1 or total.args[2:] != ("sum",):
        return False
    homes = {stages.stage.get(x) for x in made.all_input_nodes}
    if len(homes) < 2 or None in homes or len(made.args) != 2:
        return False
    graph, apart = moments.graph, []
    for x in made.args:
        with graph.inserting_before(total):
            one = graph.call_function(collectives.all_reduce, (x, *total.args[1:]))
        one.meta = {**total.meta, "val": x.meta["val"]}
        apart.append(one)
    with graph.inserting_before(total):
        both = graph.call_function(aten.add.Tensor, tuple(apart))
    both.meta = dict(total.meta)
    total.replace_all_uses_with(both)
    for old in (total, made):
        graph.erase_node(old)
        moments.forget(old)
        stages.stage.pop(old, None)
    moments.sums += apart
    for node in (*apart, both):
        moments.when[node] = AFTER
        moments.stateful.add(node)
    return True


def _stages_of_homes(
    homes: Mapping[str, frozenset[int]], place_of: list[int]
) -> dict[str, frozenset[int]]:
    """The stages at the place of each state tensor that one place keeps."""
    return {
        name: frozenset(s for s, at in enumerate(place_of) if at in places)
        for name, places in homes.items()
        if len(places) == 1
    }


def _owners(
    program: Program,
    moments: Moments,
    parts: Parts,
    place_of: list[int],
    homes: Mapping[str, frozenset[int]],
) -> dict[str, frozenset[int]]:
    """State lives at the first stage that reads it; what never changes, at every place that reads it."""
    everywhere = frozenset(place_of)
    readers: dict[str, set[int]] = {}
    for (stage, _), given in parts.given.items():
        for x in given:
            for name in _state_behind(x):
                readers.setdefault(name, set()).add(stage)
    captured, found = program.captured, dict[str, frozenset[int]]()
    for entry in captured.state:
        stages = readers.get(entry.name, set())
        if entry.name in homes:
            found[entry.name] = homes[entry.name]
        elif entry.name not in captured.updated:
            found[entry.name] = frozenset(place_of[s] for s in stages) or everywhere
        else:
            found[entry.name] = frozenset({place_of[min(stages, default=0)]})
    for entry in captured.state:
        if entry.kind == "slot" and entry.owner in found:
            found[entry.name] = found[entry.owner]
    return found


def _state_behind(x: fx.Node) -> set[str]:
    found, todo, names = {x}, [x], set[str]()
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and "name" in node.meta:
            names.add(node.meta["name"])
        for y in node.all_input_nodes:
            if y not in found:
                found.add(y)
                todo.append(y)
    return names


class _Writer:
    def __init__(
        self,
        program: Program,
        moments: Moments,
        stages: Stages,
        parts: Parts,
        owners: dict[str, frozenset[int]],
        schedule: Schedule,
    ) -> None:
        self.program, self.moments, self.stages = program, moments, stages
        self.parts, self.owners, self.schedule = parts, owners, schedule
        self.num_places = len(schedule.rows)
        self.places = range(self.num_places)

    def write(self) -> Timed:
        rows = rows_of(self.schedule, self.parts)
        self.bodies = [self._body(p, rows[p]) for p in self.places]
        self.given = [self._given(p) for p in self.places]
        made_at = {
            total: self.schedule.rank_of(self.parts.home_of(total.args[0])[0])  # type: ignore[arg-type]
            for total in self.moments.sums
        }
        plan = plan_places(
            self.moments, self.num_places, self.owners, made_at, self.given, self._results()
        )
        programs = [self._program(_Graph(self, plan, p).write(), p) for p in self.places]
        return Timed(programs, self.stages, self.owners, self.schedule, self.bodies)

    def _program(self, graph: fx.Graph, place: int) -> Program:
        captured = self.program.captured
        mine = [name for name in captured.updated if place in self.owners[name]]
        return replace(self.program, graph=graph, captured=replace(captured, updated=mine))

    def _mine(self, place: int) -> list[tuple[int, str]]:
        return [k for k in self.parts.parts if self.schedule.rank_of(k[0]) == place]

    def _given(self, place: int) -> list[fx.Node]:
        mine = self._mine(place)
        return list(dict.fromkeys(x for k in mine for x in self.parts.given[k]))

    def _body(self, place: int, row: list[Do]) -> Body:
        mine = self._mine(place)
        stages = {s for s, _ in mine}
        messages = {k: v for k, v in self.parts.messages.items() if {k[0], k[2]} & stages}
        totals = {t.name: t for t in self.moments.sums}
        names = [n for k in mine for n in self.parts.parts[k].summed]
        return Body(
            num_micro=self.program.layout.micro,
            parts={k: self.parts.parts[k] for k in mine},
            row=tuple(row),
            given=tuple(x.name for x in self._given(place)),
            results=tuple(sum_of(totals[n]) for n in names),
            messages={k: tuple(x.name for x in v) for k, v in messages.items()},
            vals={x.name: fake_of(x) for v in messages.values() for x in v},
            sources={x.name: source_of(x) for v in messages.values() for x in v},
        )

    def _results(self) -> list[tuple[fx.Node, frozenset[int]]]:
        returned, updates = output_of(self.moments.graph)
        found = [(x, frozenset(self.places)) for x in returned if isinstance(x, fx.Node)]
        named = zip(updates, self.program.captured.updated, strict=True)
        return found + [(x, self.owners[name]) for x, name in named]


def sum_of(total: fx.Node) -> Sum:
    """What a sum over micro-batches does."""
    if total.target is collectives.all_reduce:
        return Sum(total.name, str(total.args[2]))
    _, _, dim, outer = total.args
    return Sum(total.name, "join", int(dim), int(outer))  # type: ignore[arg-type]


def rows_of(schedule: Schedule, parts: Parts) -> list[list[Do]]:
    """The schedule's rows with the messages that there are."""
    if schedule.num_stages == 1:
        return [[Do("B", a.stage, a.micro) for a in row] for row in schedule.rows]
    from tutti.pipeline.transfers import with_transfers

    edges = sorted({(min(a, b), max(a, b)) for a, _, b in parts.messages})
    rows = []
    for row in with_transfers(schedule, edges).rows:
        made = [_do(a) for a in row]
        rows.append([d for d in made if not d.way or _message(d) in parts.messages])
    return rows


def _message(do: Do) -> tuple[int, str, int]:
    if do.way == SEND:
        return do.stage, do.kind, do.other
    return do.other, do.kind, do.stage


def _do(action: Action) -> Do:
    if action.kind == "S":
        return Do(action.moved, action.stage, action.micro, SEND, action.peer)
    if action.kind == "R":
        return Do(action.moved, action.stage, action.micro, RECEIVE, action.peer)
    return Do(action.kind, action.stage, action.micro)


def output_of(graph: fx.Graph) -> tuple[list[Any], list[fx.Node]]:
    """What a program returns, and its new state."""
    both: Any = graph.output_node().args[0]
    return both


class _Graph:
    """The graph of one place."""

    def __init__(self, writer: _Writer, plan: Plan, place: int) -> None:
        self.writer, self.plan, self.place = writer, plan, place
        self.graph = fx.Graph()
        self.here: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.Graph:
        messages = bundles(self.plan.transfers)
        moments, works = self.writer.moments, self.plan.works[self.place]
        early = {t for level in moments.early for t in level}
        for node in moments.graph.nodes:
            if node.op == "placeholder":
                self.here[node] = self._given(node)
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

    def _given(self, node: fx.Node) -> fx.Node:
        """An input; of state that other places keep there is nothing here."""
        here, name = self.graph.node_copy(node), node.meta.get("name")
        if self.place not in self.writer.owners.get(name, {self.place}):  # type: ignore[arg-type]
            here.meta = {**here.meta, "val": here.meta["val"].new_empty(0)}
        return here

    def _exchange(self, source: int, to: int, nodes: list[fx.Node]) -> None:
        if self.place == source:
            xs = [self.here[n] for n in nodes]
            sent = self.graph.call_function(collectives.send, (xs, source, to))
            sent.meta = {"val": None, "source": source_of(nodes[0])}
        elif self.place == to:
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
        body, given = self.writer.bodies[self.place], self.writer.given[self.place]
        totals = {t.name: t for t in self.writer.moments.sums}
        results = [totals[s.name] for s in body.results]
        if body.row:
            self._play(body, given, results)

    def _early(self, total: fx.Node) -> None:
        part, given = early_part(self.writer.moments, total)
        num_micro = self.writer.program.layout.micro
        row = tuple(Do("F", 0, k) for k in range(num_micro))
        names = tuple(x.name for x in given)
        body = Body(num_micro, {(0, "F"): part}, row, names, (sum_of(total),))
        self._play(body, given, [total])

    def _play(self, body: Body, given: list[fx.Node], results: list[fx.Node]) -> None:
        args: Any = (body, [self.here[x] for x in given])
        node = self.graph.call_function(loop, args)
        node.meta = {"val": [t.meta["val"] for t in results], "region": "backward"}
        self._items(node, results)

    def _output(self) -> None:
        """All that is returned, and the new values of the state that this place keeps."""
        returned, updates = output_of(self.writer.moments.graph)
        names = self.writer.program.captured.updated
        mine = [self.place in self.writer.owners[n] for n in names]
        self.graph.output(
            (
                fx.map_arg(list(returned), self.here.__getitem__),
                [self.here[x] for x, ok in zip(updates, mine, strict=True) if ok],
            )
        )
