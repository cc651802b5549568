"""The text form of real programs: it parses back to the same lines, and says what it should."""

from __future__ import annotations

import pytest
import torch

from subjects import program, subject
from tutti.graph import text
from tutti.graph.text import Line, parse
from tutti.layout import Sharding

PROGRAMS = [
    *[("gpt", "data=2 zero=3"), ("gpt", "data=2 seq=2 tensor=2"), ("resnet", "data=2")],
    *[("t5", "seq=2"), ("adafactor", "data=2 zero=1")],
]


@pytest.mark.parametrize(("name", "layout"), PROGRAMS)
def test_programs_parse_back(name: str, layout: str) -> None:
    graph = program(name, layout).graph
    found = text.lines(graph)
    assert parse(text.text(graph)) == found
    assert len(found) == sum(n.op != "output" for n in graph.nodes)


@pytest.mark.parametrize("name", ["gpt_tied", "lstm"])
def test_captured_graphs_parse_back(name: str) -> None:
    graph = subject(name).captured.graph
    assert parse(text.text(graph)) == text.lines(graph)


def test_values_are_named_once_and_used_after_they_are_named() -> None:
    named: set[str] = set()
    for line in parse(text.text(program("gpt", "data=2 zero=3").graph)):
        for argument in line.arguments:
            used = argument.removeprefix("%")
            assert not argument.startswith("%") or used in named, line
        assert line.name not in named
        named.add(line.name)


def test_types_are_those_of_the_values() -> None:
    made = program("gpt", "data=2 tensor=2")
    nodes = [n for n in made.graph.nodes if n.op != "output"]
    for node, line in zip(nodes, text.lines(made.graph), strict=True):
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            continue
        dtype, _, rest = line.type.partition("[")
        assert dtype == text.SHORT[val.dtype]
        body, _, partial = rest.partition("]")
        sharding = Sharding.parse(f"{body} {partial}")
        if "sharding" in node.meta:
            assert sharding == node.meta["sharding"]
            assert sharding.local_shape(made.mesh) == tuple(val.shape)


def test_the_megatron_lines_read_as_in_the_guide() -> None:
    """Column-parallel, row-parallel, one pending sum, one all-reduce."""
    made = program("gpt", "tensor=2")
    lines = {line.name: line for line in text.lines(made.graph)}
    pending = [x for x in lines.values() if x.op == "mm" and "partial" in x.type]
    assert {x.type for x in pending} == {"f32[128, 32]{partial tensor}"}
    assert all(x.comment.startswith("zoo_models.py:") for x in pending[:4])
    reduced = [x for x in lines.values() if x.op == "all_reduce"]
    assert len(reduced) == len(made.collectives)
    assert all(x.arguments[1:] == ("tensor", "sum") and "partial" not in x.type for x in reduced)
    assert lines["blocks.0.up.weight"] == Line(
        "blocks.0.up.weight", "f32[128@tensor, 32]", "input", ()
    )


@pytest.mark.parametrize(
    "line",
    [
        Line(
            "3", "f32[8@data+tensor, 2*4@seq]{partial tensor}", "sum.dim_IntList", ("%2", "[0, 1]")
        ),
        Line("x", "number", "mul", ("%1", "2.5"), "train.py:3"),
        Line("0", "i64[4]", "positions", ("'8@data, 4'", "0", "cpu")),
        Line("a.b", "b8[]", "input", ()),
    ],
)
def test_a_line_parses_back(line: Line) -> None:
    assert parse(str(line)) == [line]
    assert parse(f"\n{line}\n\n{line}") == [line, line]


@pytest.mark.parametrize("wrong", ["hello", "%1 = mm(%0)", "%1: f32[2] mm(%0)"])
def test_what_is_no_line_is_refused_with_its_number(wrong: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not of the form"):
        parse(f"%0: f32[2] = input()\n{wrong}")
