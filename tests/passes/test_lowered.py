"""The passes on small programs as on large ones: every threshold is lowered, so each pass finds its cases.

The programs of other suites have weights of a few hundred bytes, below most thresholds.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

import stacks
from tutti.graph.ops.loop import Body, loop
from tutti.layout import Layout
from tutti.partition import choose
from tutti.passes import bucket, early_reductions, early_sends, onednn, overlap, shared_buffers
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.pipeline.ranks import pipe_ranks
from tutti.pipeline.ready import in_time
from tutti.planner.memory import predict

LOWERED: dict[Any, dict[str, float]] = {
    bucket: {"SMALL_NBYTES": 0, "LIGHT_NBYTES": 0},
    early_reductions: {"SMALL_NBYTES": 0},
    early_sends: {"LEAST_SECONDS": 0.0},
    onednn: {"START_SECONDS": 0.0},
    overlap: {"LEAST_GAP": 0},
    shared_buffers: {"LEAST_NBYTES": 32},
    choose: {"SMALL": 0},
    pipe_ranks: {"SMALL": 0},
}
LAYOUTS = [
    "data=2",
    "data=2 zero=1 micro=2",
    "data=2 zero=3",
    "data=2 zero=3 micro=2 remat=full",
    "pipe=2 micro=4",
    "data=2 pipe=2 micro=2 zero=1",
    "data=2 pipe=2 micro=2 zero=3",
    "data=2 pipe=2 micro=4 schedule=interleaved",
    "data=2 pipe=2 micro=4 zero=1 schedule=zbv",
    "data=2 pipe=2 micro=4 zero=2 schedule=zb",
]


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, numbers in LOWERED.items():
        for name, number in numbers.items():
            assert getattr(module, name) > number
            monkeypatch.setattr(module, name, number)


@pytest.mark.parametrize("shared", ["", "off"], ids=["shared", "sockets"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["stack", "thrice", "telling"])
def test_the_same_step(
    name: str, layout: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        monkeypatch.setenv("TUTTI_SHARED_MEMORY", shared)
    found = stacks.verdict(name, layout)
    assert found.ok, str(found)


@pytest.mark.parametrize("target", [Target(), Target(gpus=True)], ids=["here", "gpus"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["stack", "common"])
def test_the_memory_of_every_rank_is_predicted(name: str, layout: str, target: Target) -> None:
    for one in in_time(stacks.subject(name).program(Layout.parse(layout))).programs:
        graph = optimized(one, target)
        assert predict(one, graph).peak_nbytes > predict(one, graph).state_nbytes > 0


def test_the_passes_find_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered thresholds lead to other graphs, also in the parts of a pipeline."""
    layouts = [Layout.parse(text) for text in (LAYOUTS[1], LAYOUTS[7])]
    made = [in_time(stacks.subject("stack").program(layout)).programs for layout in layouts]
    low = [[printed(optimized(one, Target())) for one in programs] for programs in made]
    monkeypatch.undo()
    for programs, lower in zip(made, low, strict=True):
        assert lower != [printed(optimized(one, Target())) for one in programs]


def printed(graph: fx.Graph) -> str:
    """The ops of a graph and of the bodies of its loops."""
    found = [str(n.target) for n in graph.nodes]
    for n in graph.nodes:
        if n.target is loop:
            body: Any = n.args[0]
            assert isinstance(body, Body)
            found += [printed(part.graph) for part in body.played if part is not None]
    return "\n".join(found)
