"""Slots of values worked out beforehand: each part of a row gets those meant for it, and none stays."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
from torch import fx

import stacks
from tutti.graph.ops.loop import GATHER, RECEIVE, REDUCE, Body, Do, LoopPart, Sum, loop
from tutti.graph.players.playing import Row, play
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.passes import early_reductions as early
from tutti.passes.accumulate import accumulate
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time

LAYOUTS = (
    "micro=7",
    "data=2 micro=4",
    "data=2 pipe=2 micro=4 zero=1 schedule=interleaved",
    "pipe=2 micro=4",
    "pipe=4 micro=7 schedule=zb",
    "pipe=2 micro=4 schedule=zbv",
    "pipe=2 micro=4 schedule=1f1b",
    "data=2 pipe=2 micro=7 zero=3",
)


class Value:
    """Something that knows its name and what it belongs to."""

    def __init__(self, name: str, of: tuple[Any, ...]) -> None:
        self.name, self.of = name, of

    def __repr__(self) -> str:
        return f"{self.name} of {self.of}"


class Call(NamedTuple):
    do: Do
    num_living: int  # values, while it runs


class Told:
    """An engine that checks what it is given, and notes how many values live."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.kinds = {id(p): key for key, p in body.every_part()}
        self.living: WeakSet[Value] = WeakSet()
        self.given = {name: self.value(name, "before") for name in body.given}
        self.calls: list[Call] = []

    def call(
        self, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        stage, kind = self.kinds[id(part)]
        do = Do(kind, stage, micro)
        added = part.summed[: part.num_added] if adding else ()
        assert [x.name for x in inputs] == [*part.inputs, *part.totals, *added]
        count = self.body.num_micro
        ended = len(part.inputs) + len(part.totals)
        for x in inputs[: len(part.inputs)]:
            if x.name in self.given:
                assert x.of == ("before",)
            else:
                assert x.of in (self.body.scope_of(do, x.name), *self.handed(do, x.name))
        for x in inputs[len(part.inputs) : ended]:
            assert x.of in (("sum", count), ("sum", count - 1))
            assert kind != REDUCE or x.of == ("sum", count)
        for x in inputs[ended:]:
            x.of = ("sum", x.of[1] + 1)
        x = None
        inputs.clear()
        self.calls.append(Call(do, len(self.living)))
        outputs = [self.value(n, *self.body.scope_of(do, n)) for n in part.outputs]
        outputs += [self.value(n, "sum", count) for n in part.reduced]
        return outputs, [self.value(n, "sum", 1) for n in part.summed[len(added) :]]

    def handed(self, do: Do, name: str) -> list[tuple[int, int]]:
        """What belongs to other stages here that hand `name` to the one of `do`."""
        near = self.body.near.items()
        return [
            (s, do.micro) for (s, _), to in near for o, ns in to if o == do.stage and name in ns
        ]

    def value(self, name: str, *of: Any) -> Value:
        made = Value(name, of)
        self.living.add(made)
        return made

    def add(self, total: Any, value: Any, op: str) -> Any:
        assert op == next(s.op for s in self.body.sums if s.name == value.name)
        assert total.name == value.name and total.of[0] == value.of[0] == "sum"
        return self.value(total.name, "sum", total.of[1] + 1)

    def join(self, values: list[Any], dim: int, outer: int) -> Any:
        assert len({x.name for x in values}) == 1
        return self.value(values[0].name, "sum", len(values))

    def send(self, do: Do, values: list[Any]) -> None:
        names = self.body.messages[do.stage, do.kind, do.other]
        assert [x.name for x in values] == list(names)
        assert all(x.of[1:] == self.body.scope_of(do, x.name)[1:] for x in values)

    def receive(self, do: Do, likes: list[Any]) -> list[Any]:
        names = self.body.messages[do.other, do.kind, do.stage]
        assert len(likes) == len(names)
        return [self.value(n, do.stage, do.micro) for n in names]


@pytest.fixture(autouse=True)
def reduces_small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "SMALL_NBYTES", 0)


def bodies(name: str, layout: str) -> list[Body]:
    """What each pipeline rank does, with and without parts that add to the totals themselves, and that reduce
    them over ranks."""
    timed = in_time(stacks.subject(name).program(Layout.parse(layout)))
    return [*timed.bodies, *map(accumulate, timed.bodies), *map(_reducing, timed.programs)]


def _reducing(program: Program) -> Body:
    """The body after all passes, for ranks that share no memory."""
    graph = optimized(program, Target())
    loops: list[Any] = [n.args[0] for n in graph.nodes if n.target is loop]
    return max(loops, key=lambda body: len(body.row))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["thrice", "telling", "summed", "penalty"])
def test_each_part_gets_its_values(name: str, layout: str) -> None:
    for body in bodies(name, layout):
        told, row = Told(body), Row(body)
        for _ in range(2):  # a row is played again at the next step
            told.calls.clear()
            results = play(row, [told.given[n] for n in body.given], told)
            assert [x.name for x in results] == list(body.results)
            assert all(x.of == ("sum", body.num_micro) for x in results)
            del results
            assert len(told.living) == len(told.given)
            assert [(c.do.stage, c.do.kind, c.num_living) for c in told.calls] == needed(body)


def needed(body: Body) -> list[tuple[int, str, int]]:
    """How many values there must be while each part runs, its own inputs gone."""
    live: defaultdict[Any, dict[str, object]] = defaultdict(dict)
    totals, ops, found = dict[str, int](), {s.name: s.op for s in body.sums}, []
    for do, part, dying in zip(body.row, body.played, body.last_reads, strict=True):
        if do.way == RECEIVE:
            names = body.messages[do.other, do.kind, do.stage]
            live[do.stage, do.micro] |= {n: object() for n in names}
            continue
        if part is not None and part.is_empty:
            continue
        near = [] if part is None else body.near[do.stage, do.kind]
        handed = {n for _, names in near for n in names}
        for name in dying - handed:
            live[body.scope_of(do, name)].pop(name, None)
        if part is None:
            continue
        totals = {n: k for n, k in totals.items() if n not in part.totals}
        values = {v for names in live.values() for v in names.values()}
        found.append((do.stage, do.kind, len(values) + sum(totals.values()) + len(body.given)))
        totals |= dict.fromkeys(part.reduced, 1)
        for name in part.outputs:
            live[body.scope_of(do, name)][name] = object()
        for name in part.summed:
            totals[name] = totals.get(name, 0) + 1 if ops[name] == "join" else 1
        for other, names in near:
            live[other, do.micro] |= {n: live[body.scope_of(do, n)][n] for n in names}
        for name in handed & dying:
            live[body.scope_of(do, name)].pop(name)
    return found


def test_slots_are_used_again() -> None:
    """With the depth of a pipeline, not with its micro-batches."""
    sizes = {}
    for micro in (4, 7, 14):
        first, *_ = bodies("stack", f"pipe=2 micro={micro}")
        sizes[micro] = Row(first).num_values
    assert sizes[4] == sizes[7] == sizes[14]


def test_a_stage_gets_the_weights_that_it_has_gathered() -> None:
    for body in bodies("stack", "data=2 pipe=2 micro=7 zero=3"):
        told = Told(body)
        play(Row(body), list(told.given.values()), told)
        assert any(c.do.kind == GATHER for c in told.calls)


def test_what_is_joined_is_not_kept_beside_the_next() -> None:
    part = LoopPart(fx.Graph(), (), (), ("a", "b"))
    row = tuple(Do("F", 0, k) for k in range(3))
    sums = (Sum("a", "join"), Sum("b", "join"))
    body = Body(3, {(0, "F"): part}, row, (), sums, ("a", "b"))
    told, living = Told(body), []
    join = told.join

    def counted(values: list[Any], dim: int, outer: int) -> Any:
        living.append(len(told.living))
        return join(values, dim, outer)

    told.join = counted  # type: ignore[method-assign]
    play(Row(body), [], told)
    assert living == [6, 4]  # three of each; then the first joined, and three
