"""The list of passes: each can be left out, a wrong one is found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tutti.environment import WITHOUT
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.passes import pass_table
from tutti.passes.pass_table import PASSES, Pass, optimized, optional_names
from tutti.passes.target import Target
from tutti.verification.verdict import Subject


def _train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Subject(_train, model, optimizer, (torch.randn(8, 8), torch.randn(8, 4)))


def test_names_are_unique() -> None:
    assert len({p.name for p in PASSES}) == len(PASSES)


def _columns(row: Pass) -> str:
    """A row as the documentation has it."""
    kinds = {"program": row.on_program, "parts": row.on_part, "loops": row.on_loop}
    rewrites = ", ".join(kind for kind, rewrite in kinds.items() if rewrite is not None)
    if row.taken_back is not None:
        return f"| `{row.name}` | nothing: partition has written it | it is taken back |"
    return f"| `{row.name}` | {rewrites} | {'never' if row.needed else 'it does not run'} |"


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/concepts/passes.md").read_text()
    rows = page.split("| pass | rewrites | left out |\n| --- | --- | --- |\n")[1].split("\n\n")[0]
    assert rows == "\n".join(map(_columns, PASSES))


def test_a_needed_pass_has_no_name_to_leave_it_out(subject: Subject) -> None:
    needed = [p.name for p in PASSES if p.needed]
    assert needed and not set(needed) & set(optional_names())
    program = subject.program(Layout.parse("data=2"))
    for name in needed:
        with pytest.raises(LayoutError, match=f'no pass is called "{name}"'):
            optimized(program, Target(), without={name})


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3"])
@pytest.mark.parametrize("left_out", ["", *optional_names(), "all"])
def test_the_same_step_without_any_pass(
    subject: Subject, layout: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ",".join(optional_names()) if left_out == "all" else left_out
    monkeypatch.setenv(WITHOUT.name, names)
    assert subject.verdict(Layout.parse(layout)).ok


def test_an_unknown_name_is_refused(subject: Subject) -> None:
    program = subject.program(Layout.parse("data=2"))
    with pytest.raises(LayoutError, match='no pass is called "inplace"'):
        optimized(program, Target(), without={"inplace"})


def test_a_wrong_pass_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: fx.Graph, *_: Any) -> None:
        _, updates = next(n for n in graph.nodes if n.op == "output").args[0]
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
            more = graph.call_function(torch.ops.aten.mul.Tensor, (updates[0], 1.001))
        more.meta = dict(updates[0].meta)
        updates[0].replace_all_uses_with(more, lambda user: user.op == "output")

    monkeypatch.setattr(pass_table, "PASSES", (*PASSES[:2], Pass("wrong", wrong), *PASSES[2:]))
    verdict = subject.verdict(Layout.parse("data=2"))
    assert not verdict.ok and verdict.wrong_pass == "wrong"
    assert "wrong" in str(verdict)
