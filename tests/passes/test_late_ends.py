"""`late_ends`: reductions under way between the last backwards of a rank's stages, with the same values."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

import stacks
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import Body, LoopPart, loop
from tutti.layout import Layout
from tutti.passes import early_reductions
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.planner.memory import predict

THREE = "data=2 pipe=2 micro=4 schedule=interleaved(3)"
LAYOUTS = (
    THREE,
    "data=2 pipe=2 micro=4 zero=1 schedule=interleaved",
    "data=2 pipe=2 micro=4 zero=1 schedule=zbv",
    "data=2 pipe=2 micro=2 zero=1 remat=full schedule=interleaved",
)


@pytest.fixture(autouse=True)
def reduces_small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_reductions, "SMALL_NBYTES", 0)


def bodies(name: str, layout: str, *without: str) -> list[Body]:
    made = in_time(stacks.subject(name).program(Layout.parse(layout))).programs
    graphs = [optimized(one, Target(), without=without) for one in made]
    found: list[Any] = [n.args[0] for g in graphs for n in g.nodes if n.target is loop]
    return [body for body in found if body.last]


def ended(part: LoopPart) -> tuple[int, int]:
    """The reductions that a part ends: its own, and those of another part."""
    here: list[Any] = [n.args[0] for n in part.graph.nodes if n.target is collectives.finish]
    own = sum(start.target is collectives.start for start in here)
    return own + sum(n.target is collectives.together for n in part.graph.nodes), len(here) - own


def begun(graph: fx.Graph) -> int:
    return sum(n.target in (collectives.start, collectives.together) for n in graph.nodes)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_each_stage_ends_the_reductions_of_the_one_before(layout: str) -> None:
    for body in bodies(
        "common", layout
    ):  # its loss is short beside a layer: each stage has weights
        ending = {id(p) for p in body.last.values()}
        row = [part for part in body.played if part is not None and id(part) in ending]
        assert len(row) == len(body.last) >= 2
        before = 0
        for part in row:
            own, others = ended(part)
            assert others == before
            assert own == (begun(part.graph) if part is row[-1] else 0)
            before = begun(part.graph)
        assert before


def test_a_rank_with_one_stage_waits_for_nothing_later() -> None:
    for body in bodies("stack", "data=2 pipe=2 micro=4 zero=1"):
        (part,) = body.last.values()
        assert ended(part) == (begun(part.graph), 0)


@pytest.mark.parametrize("target", [Target(), Target(gpus=True)], ids=["here", "gpus"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_a_rank_counts_reductions_under_way(layout: str, target: Target) -> None:
    """A reduction that another part ends holds as much as one that ends at once."""
    for one in in_time(stacks.subject("stack").program(Layout.parse(layout))).programs:
        late, soon = (optimized(one, target, without=x) for x in ((), ("late_ends",)))
        found = predict(one, late)
        assert found.peak_nbytes == predict(one, soon).peak_nbytes > found.state_nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["thrice", "telling", "summed", "common"])
def test_the_same_step(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_SHARED_MEMORY", "off")
    found = stacks.verdict(name, layout)
    assert found.ok, str(found)
