"""Ops of contiguous operands that do not run have the memory of those that do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from brute_force import MODE
from subjects import program
from tutti.graph.analysis import storage
from tutti.graph.analysis.aliases import keeps_order
from tutti.graph.analysis.storage import Storages
from tutti.rules.samples.op_samples import FAMILIES
from tutti.rules.samples.pointwise_samples import pointwise_samples
from tutti.torch_private.pytrees import tree_leaves

SAMPLES = [*(call for calls in FAMILIES.values() for call in calls), *pointwise_samples(MODE)]


def test_ops_that_keep_the_order_do() -> None:
    drawn = torch.Generator().manual_seed(0)
    ops = set()
    for call in SAMPLES:
        if not keeps_order(call.op):
            continue
        given = [operand.fill(operand.shape, drawn) for operand in call.operands()]
        for x in tree_leaves(call.call(given)):
            if isinstance(x, Tensor):
                assert x.is_contiguous(), call
                assert x.data_ptr() not in {y.data_ptr() for y in given} or not x.numel(), call
        ops.add(call.op)
    assert len(ops) > 100


def test_a_copy_in_another_order_runs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_function(
        torch.ops.aten._to_copy.default, (x,), {"memory_format": torch.channels_last}
    )
    with MODE:
        x.meta["val"] = torch.empty(2, 3, 4, 5)
        copy.meta["val"] = torch.empty(2, 3, 4, 5)
    assert Storages(graph, MODE).fakes[copy].stride() == (60, 1, 15, 3)


def found(graph: fx.Graph, mode: Any) -> list[Any]:
    """The form of each value, and the nodes whose memory it lies in."""
    made = Storages(graph, mode)
    return [
        (
            [
                (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
                for x in tree_leaves(fake)
                if isinstance(x, Tensor)
            ],
            [(block.node, block.nbytes) for block in made.of[node]],
        )
        for node, fake in made.fakes.items()
    ]


@pytest.mark.parametrize("name", ["gpt", "mamba", "resnet", "llama"])
@pytest.mark.parametrize("layout", ["", "data=2 tensor=2"])
def test_storages_are_those_of_all_ops_run(name: str, layout: str) -> None:
    made = program(name, layout)
    mode = made.captured.mode
    noted = found(made.graph, mode)
    with mock.patch.object(storage, "keeps_order", lambda target: False):
        assert found(made.graph, mode) == noted
    with mock.patch.object(storage, "keeps_order", lambda target: True):  # attention, views, ...
        assert found(made.graph, mode) != noted
