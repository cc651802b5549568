"""Random schedules that can be played, over random edges between stages."""

from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import strategies as st

from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Schedule

Pairs = list[tuple[int, int]]


@st.composite
def edges_of(draw: st.DrawFn, num_stages: int) -> Pairs:
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    return [pair for pair in pairs if draw(st.booleans())]


def needs(pairs: Pairs, stages: int, micros: int, split: set[int]) -> dict[Action, set[Action]]:
    """What each compute action needs, said without the package's own `Edges`."""

    def backward(stage: int, micro: int) -> Action:
        return Action("I" if stage in split else "B", stage, micro)

    found: dict[Action, set[Action]] = {}
    for m in range(micros):
        for s in range(stages):
            found[Action("F", s, m)] = {Action("F", a, m) for a, b in pairs if b == s}
            found[backward(s, m)] = {Action("F", s, m)} | {
                backward(b, m) for a, b in pairs if a == s
            }
            if s in split:
                found[Action("W", s, m)] = {Action("I", s, m)}
    return found


@st.composite
def played(draw: st.DrawFn) -> tuple[Schedule, Pairs, dict[Action, set[Action]]]:
    """A schedule from a random order in which everything can happen, its edges and all needs."""
    stages, micros = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    pairs = draw(edges_of(stages))
    split = {s for s in range(stages) if draw(st.booleans())}
    graph = needs(pairs, stages, micros, split)
    ranks = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    ready: list[Action] = []
    rows: dict[int, list[Action]] = {rank: [] for rank in ranks}
    while sorter.is_active():
        ready += sorted(sorter.get_ready(), key=str)
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        rows[ranks[action.stage]].append(action)
        sorter.done(action)
    return Schedule(tuple(tuple(row) for row in rows.values())), pairs, graph


@st.composite
def exchanged(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """`schedule` with some neighbors of some rows in each other's place."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw(st.integers(0, 4))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        if len(row) > 1:
            i = draw(st.integers(0, len(row) - 2))
            row[i], row[i + 1] = row[i + 1], row[i]
    return Schedule(tuple(map(tuple, rows)))
