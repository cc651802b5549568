"""The text of a small program before and after each pass, as `golden/<pass>.txt` has it.

After a change that is meant, write the files anew and read the difference:

    PYTHONPATH=src:tests/support python tests/passes/test_golden.py && git diff tests/passes/golden
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from pass_programs import PROGRAMS, small
from tutti.graph.ops.loop import loop
from tutti.graph.text import lines, text
from tutti.passes.pass_table import PASSES, Pass

GOLDEN = Path(__file__).parent / "golden"
ROWS = {row.name: row for row in PASSES}


def written(graph: fx.Graph) -> str:
    """The text of a graph, of what it gives out, of the parts of its loops, also for later micro-batches."""
    returned, updates = graph.output_node().args[0]  # type: ignore[misc]
    given = lines(graph)
    names = {node: line.name for node, line in zip(graph.nodes, given, strict=False)}
    out = [", ".join(f"%{names[x]}" for x in some) for some in (returned, updates)]
    found = [text(graph), f"# returns [{out[0]}], new state [{out[1]}]"]
    for node in graph.nodes:
        parts = node.args[0].parts if node.target is loop else {}
        for (stage, kind), part in parts.items():
            if part.adding is not None:
                found += [
                    f"# part {stage}{kind}, later micro-batches",
                    *map(str, lines(part.adding)),
                ]
    return "".join(f"{line.rstrip()}\n" for line in "\n".join(found).splitlines())


def before_and_after(row: Pass) -> tuple[str, str]:
    """What golden files hold: the small program of a pass, and what the pass makes of it."""
    made = small(row.name)
    before = written(made.graph)
    made.apply(row)
    made.graph.lint()
    return before, written(made.graph)


def page(row: Pass) -> str:
    before, after = before_and_after(row)
    how = "taken back" if row.taken_back is not None else "after"
    return f"# {row.name}: before\n{before}# {row.name}: {how}\n{after}"


def test_every_pass_has_a_program_and_a_file() -> None:
    assert set(PROGRAMS) == set(ROWS) == {p.stem for p in GOLDEN.glob("*.txt")}


@pytest.mark.parametrize("name", ROWS)
def test_before_and_after(name: str) -> None:
    assert page(ROWS[name]) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ROWS)
def test_a_pass_changes_its_program(name: str) -> None:
    before, after = before_and_after(ROWS[name])
    assert before != after


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for row in PASSES:
        (GOLDEN / f"{row.name}.txt").write_text(page(row))
