"""`common`: before and after as text; what must be made twice is."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from small_programs import Builder, lines
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.passes import common as module
from tutti.passes.common import common, common_before_split

aten = torch.ops.aten


def _twice(*shape: int) -> fx.Graph:
    b = Builder()
    x = b.given("x", *shape, kind="batch")
    sums = []
    for _ in range(2):
        y = b.call(aten.mul.Tensor, x, 2.0)
        sums.append(b.call(aten.add.Tensor, y, x))
    return b.done([b.call(aten.sub.Tensor, *sums)], [])


def test_before_and_after() -> None:
    graph = _twice(3)
    assert lines(graph) == [
        "mul.Tensor(%x, 2.0)",
        "add.Tensor(%1, %x)",
        "mul.Tensor(%x, 2.0)",
        "add.Tensor(%3, %x)",
        "sub.Tensor(%2, %4)",
    ]
    assert common(graph) == 2
    graph.lint()
    assert lines(graph) == ["mul.Tensor(%x, 2.0)", "add.Tensor(%1, %x)", "sub.Tensor(%2, %2)"]


def test_equal_numbers_of_other_types_are_other_operands() -> None:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    several = [b.call(aten.mul.Tensor, x, number) for number in (1, 1.0, True, 1)]
    graph = b.done(several, [])
    assert common(graph) == 1


def test_large_values_are_made_twice_and_views_of_them_once() -> None:
    size = module.MOST_NBYTES // 4 + 1
    assert common(_twice(size)) == 0
    b = Builder()
    x = b.given("x", size, 1, kind="batch")
    turned = [b.call(aten.permute.default, x, [1, 0], shape=(1, size)) for _ in range(2)]
    assert common(b.done(turned, [])) == 1


def _masked(*uses: int) -> list[str]:
    """A large mask made at 0, 1 and 2, which each of `uses` reads once more at the end."""
    size = module.MOST_NBYTES // 4 + 1
    b = Builder()
    x = b.given("x", size, kind="batch")
    masks, found = [], []
    for _ in range(3):
        masks.append(b.call(aten.mul.Tensor, x, 2.0))
        found.append(b.call(aten.sin.default, b.call(aten.add.Tensor, masks[-1], x)))
    for use in uses:
        seen = b.call(aten.reshape.default, masks[use], [size, 1], shape=(size, 1))
        found.append(b.call(aten.cos.default, seen))
    graph = b.done(found, [])
    common(graph)
    graph.lint()
    return [line for line in lines(graph) if line.startswith("mul")]


def test_a_large_value_that_is_still_there_is_made_once() -> None:
    assert len(_masked()) == 3
    assert len(_masked(0)) == 1
    assert len(_masked(0, 1, 2)) == 1
    assert len(_masked(1)) == 2
    assert len(_masked(2)) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_before_a_split_in_time_only_what_all_micro_batches_share(shared: bool) -> None:
    b = Builder()
    x, w = b.given("x", 3, kind="batch"), b.given("w", 3, kind="parameter")
    found = [b.call(aten.mul.Tensor, given, 2.0) for given in (x, w, x, w)]
    graph = b.done(found, [])
    assert common_before_split(graph, found[1::2] if shared else []) == 1 + shared
    ofs = ["mul.Tensor(%x, 2.0)", "mul.Tensor(%w, 2.0)", "mul.Tensor(%w, 2.0)"]
    assert lines(graph) == ofs[: 3 - shared]


def test_a_value_of_several_modules_belongs_to_the_one_around_them() -> None:
    graph = _twice(3)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node, name in zip(nodes, ["a.0.f", "a.0.f", "a.1.f", "a.0.g", "a.1"], strict=True):
        node.meta["module"] = name
    assert common(graph) == 2
    kept = [node.meta["module"] for node in graph.nodes if node.op == "call_function"]
    assert kept == ["a", "a.0", "a.1"]


def test_what_is_recomputed_to_save_memory_stays() -> None:
    graph = _twice(3)
    again = [node for node in graph.nodes if node.op == "call_function"][2:4]
    for node in again:
        node.meta[RECOMPUTED] = "mul"
    assert common(graph) == 0


def test_random_and_overwriting_calls_stay() -> None:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    for target in (aten.bernoulli.p, aten.mul_.Tensor):
        b.call(target, x, 0.5)
        b.call(target, x, 0.5)
    assert common(b.done([x], [])) == 0


def test_the_same_bits() -> None:
    found = []
    x = torch.randn(5)
    for rewritten in (False, True):
        graph = _twice(5)
        assert not rewritten or common(graph) == 2
        ((returned, _),) = VirtualRanks(Mesh(())).run(graph, nn.Module(), [[x]])
        found.append(returned[0])
    assert torch.equal(*found)
