"""Faults put in on purpose: `verify` sees each of them and names the first value that differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zoo
from subjects import subject, verdict
from tutti.capture.captured import Captured
from tutti.capture.spelling import rewrites
from tutti.capture.step import capture
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.rules import table
from tutti.verification.verdict import Subject, Verdict
from wrong_programs import SHORT, assert_caught, drop, find, fresh, mean_of_means
from zoo_models import GPT
from zoo_steps import plain_step, token_batch

aten = torch.ops.aten


def broken(monkeypatch: pytest.MonkeyPatch, op: Any, **changes: Any) -> None:
    """The rule of `op` with some of its fields replaced."""
    entry = table.TABLE[op]
    assert callable(entry)
    monkeypatch.setitem(table.TABLE, op, lambda node: replace(entry(node), **changes))


def test_a_matmul_whose_shared_factor_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, aten.mm.default, apart=frozenset({0}))
    made = fresh("tensor=2")
    assert_caught(verdict(SHORT, "", made), "self.o(heads", "blocks.0.attn.o")


def test_a_softmax_whose_dim_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, aten._log_softmax.default, whole=frozenset())
    made = fresh("tensor=2", {"head.weight": "tensor, -"})
    found = verdict(SHORT, "", made)
    assert_caught(found, "F.cross_entropy(")
    assert found.first_difference is not None
    assert "_log_softmax" in found.first_difference.op


def test_a_missing_reduction_of_an_activation() -> None:
    made = fresh("tensor=2")
    node = find(
        made,
        lambda n: (
            n.meta["value"].meta.get("module") == "blocks.0.down"
            and n.meta["user"].meta["region"] == "forward"
        ),
    )
    drop(made, node)
    # The bias is added to one rank's part of the sum.
    assert_caught(verdict(SHORT, "", made), "self.down(", "blocks.0.down")


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1"])
def test_a_missing_reduction_of_a_gradient(layout: str) -> None:
    made = fresh(layout)
    weight = (64, 32)  # of the embedding; the head's gradient has the same shape
    node = next(
        n
        for n in made.collectives
        if n.target in (collectives.all_reduce, collectives.reduce_scatter)
        and tuple(n.args[0].meta["val"].shape) == weight
    )
    if node.target is collectives.reduce_scatter:
        with made.graph.inserting_before(node):
            part = made.graph.call_function(collectives.shard, (*node.args[:4],))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        made.graph.erase_node(node)
    else:
        drop(made, node)
    assert_caught(verdict(SHORT, "", made), "clip_grad_norm_")


def test_a_mean_of_means() -> None:
    made = fresh("data=4")
    mean_of_means(made, "data")
    assert_caught(verdict(SHORT, "", made), "F.cross_entropy(")


def test_a_mean_of_means_is_the_mean_where_all_ranks_count_alike() -> None:
    """The edit above is wrong for its numbers alone: with even counts it passes."""
    tokens, _ = token_batch(0)
    torch.manual_seed(0)
    model = GPT(num_layers=1)
    even = Subject(plain_step, model, zoo.adamw(model), (tokens, tokens.roll(-1, 1)))
    made = even.program(Layout.parse("data=4"))
    mean_of_means(made, "data")
    assert even.verdict(made.layout, program=made).ok


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
def test_a_gradient_norm_of_local_parts_only(layout: str) -> None:
    made = fresh(layout)
    drop(made, find(made, lambda n: n.meta["user"].target is aten.sqrt.default))
    found = verdict(SHORT, "", made)
    assert_caught(found, "clip_grad_norm_")
    assert found.first_difference is not None
    assert "sqrt" in found.first_difference.op


@torch.no_grad()
def logits_step(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def test_the_wrong_order_of_a_dim_that_two_axes_split() -> None:
    torch.manual_seed(0)
    whole = Subject(logits_step, GPT(num_layers=1), None, token_batch(0)[:1], steps=1)
    place = {"head.weight": "expert+tensor, -"}
    layout = Layout.parse("expert=2 tensor=2")
    right = whole.program(layout, place)
    (gather,) = right.collectives
    axes = gather.args[1]
    assert gather.target is collectives.all_gather and set(axes) == {"expert", "tensor"}
    assert whole.verdict(layout, program=right).ok
    gather.args = (gather.args[0], axes[::-1], *gather.args[2:])
    found = whole.verdict(layout, program=right)
    assert_caught(found, "self.head(", "head")
    assert found.first_difference is not None
    # Every element is there, elsewhere: norms do not tell.
    assert found.first_difference.norm == pytest.approx(found.first_difference.expected_norm)


class Counting(nn.Module):
    """A model with state where no capture looks for it: in a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        calls = int(self.file.read_text()) + 1
        self.file.write_text(str(calls))
        return self.head(x) / calls


def squares_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def halving_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = squares_step(model, optimizer, x)
    optimizer.param_groups[0]["lr"] *= 0.5
    return loss


def assert_capture_fault(found: Verdict) -> None:
    assert not found.ok
    assert found.max_error < 1e-9 and found.first_difference is None
    assert found.capture_error > 0.1 and found.worst_capture
    assert f"largest in {found.worst_capture}" in str(found)


def test_a_model_that_counts_where_nothing_looks(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("0")
    torch.manual_seed(0)
    model = Counting(tmp_path / "calls")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(squares_step, model, optimizer, (torch.randn(8, 16),))
    assert_capture_fault(subject.verdict(Layout.parse("data=2")))


def _with_a_constant_learning_rate(*args: Any, **options: Any) -> Captured:
    made = capture(*args, **options)
    lr = made.placeholder("optim.0.lr")
    for user in list(lr.users):
        user.args = fx.map_arg(user.args, lambda x: 0.5 if x is lr else x)  # type: ignore[assignment]
        user.kwargs = fx.map_arg(user.kwargs, lambda x: 0.5 if x is lr else x)  # type: ignore[assignment]
    return made


def test_a_learning_rate_that_is_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = (torch.randn(8, 16),)
    assert Subject(halving_step, model, optimizer, batch).verdict(Layout.parse("")).ok
    monkeypatch.setattr("tutti.verification.verdict.capture", _with_a_constant_learning_rate)
    assert_capture_fault(Subject(halving_step, model, optimizer, batch).verdict(Layout.parse("")))


def test_random_numbers_that_depend_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout drawn for the local shape, as if each rank had a generator of its own."""
    made = subject("gpt_tied").program(Layout.parse("data=2"), None)
    for node in made.graph.nodes:
        if node.target is collectives.draw_part:
            node.args = (node.args[0], list(node.meta["val"].shape), *node.args[2:6])
    assert_caught(verdict("gpt_tied", "", made), "self.dropout(", "dropout")


def test_one_device_is_the_same_step() -> None:
    found = subject("gpt").verdict(Layout.parse(""))
    assert found.ok and found.layout == "one device" and found.first_difference is None


def test_a_result_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers are not enough: what the script does with a result depends on its dtype."""

    def returns_ones(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), torch.ones(4).fill_(torch.tensor(2))

    def unchanged(_emit: Any, node: fx.Node) -> Any:
        return _emit(aten.expand.default, node.args[1], [4])

    model = nn.Linear(3, 3)
    given = returns_ones, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 3),)
    assert Subject(*given).verdict(Layout()).ok
    monkeypatch.setitem(rewrites.REWRITES, aten.fill.Tensor, unchanged)
    wrong = Subject(*given).verdict(Layout())
    assert not wrong.ok and wrong.worst_capture == "returned value 1 (step 0)"
