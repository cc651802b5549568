"""Edits that make a partitioned program wrong, and what a verdict then says."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import torch
from torch import fx

import zoo
from subjects import subject
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.verification.verdict import Verdict

aten = torch.ops.aten


# A GPT of one layer: its learning rate is stepped outside the program.
SHORT = "scheduler"


def fresh(layout: str, place: dict[str, str] | None = None) -> Program:
    """A program of its own, to be edited."""
    return subject(SHORT).program(Layout.parse(layout), place or zoo.CASES[SHORT].place)


def drop(made: Program, node: fx.Node) -> None:
    """Let everyone use what goes into the collective `node`."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    made.graph.erase_node(node)


def find(made: Program, chosen: Callable[[fx.Node], bool]) -> fx.Node:
    """The one collective that is `chosen`."""
    (node,) = [n for n in made.collectives if chosen(n)]
    return node


def assert_caught(found: Verdict, line: str, module: str = "") -> None:
    """Not ok, by far, and the first difference stands at a source line that holds `line`."""
    assert not found.ok and not found
    assert found.max_error > 1e-6
    first = found.first_difference
    assert first is not None and first.error > 1e-6
    path, _, number = first.source.rpartition(":")
    assert line in linecache.getline(path, int(number)), first
    assert first.module == module
    assert str(found).count("\n") == 3 and "NOT the same step" in str(found)
    assert first.source in str(found) and f"%{first.node}" in str(found)


def mean_of_means(made: Program, axis: str) -> None:
    """Let each part along `axis` divide by its own count of targets, and average what they have."""
    total, count = (
        n
        for n in made.collectives
        if n.target is collectives.all_reduce and not n.meta["val"].ndim
        if n.meta["user"].target is aten.div.Tensor and n.meta["user"].meta["region"] == "forward"
    )
    size = made.mesh.size(axis)
    (loss,) = [u for u in total.users if u.target is aten.div.Tensor and u.args[1] is count]
    with made.graph.inserting_after(count):
        share = made.graph.call_function(aten.mul.Tensor, (count.args[0], float(size)))
    share.meta = dict(count.meta)
    count.replace_all_uses_with(share, delete_user_cb=lambda u: u is not share)
    drop(made, total)
    with made.graph.inserting_after(loss):
        mean = made.graph.call_function(collectives.all_reduce, (loss, (axis,), "sum"))
    mean.meta = dict(loss.meta)
    loss.replace_all_uses_with(mean, delete_user_cb=lambda u: u is not mean)
    made.graph.erase_node(count)
    # The parts of the loss make up the loss only when summed: that is what the value is now.
    made.made = [
        (v, n, s.with_partial(((axis, "sum"),)) if n is loss else s) for v, n, s in made.made
    ]
    made.graph.lint()
