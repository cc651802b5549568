"""The CTC loss as an op: its shapes, and the memory that it borrows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tutti.graph.analysis.scratch import borrowed
from tutti.graph.analysis.storage import Storages
from tutti.graph.ops.ctc import ctc_loss, ctc_slopes
from tutti.rules.samples.ctc_samples import CTC

aten = torch.ops.aten


@pytest.mark.parametrize(("op", "num_tables"), ((ctc_loss, 1), (ctc_slopes, 2)))
def test_it_borrows_the_tables_of_the_longest_target(op: Any, num_tables: int) -> None:
    call, mode = next(c for c in CTC if c.op is op), FakeTensorMode()
    node = call.node(mode)
    log_probs, targets, inputs, lengths = [
        o.made(torch.Generator().manual_seed(0)) for o in call.operands()
    ]
    longest = torch.full_like(lengths, targets.shape[1])
    _, table = aten._ctc_loss.Tensor(log_probs, targets, inputs, longest)
    assert borrowed(node, Storages(node.graph, mode)) == num_tables * table.nbytes


@pytest.mark.parametrize("call", CTC, ids=str)
def test_its_shapes_are_known_before_it_runs(call: Any) -> None:
    made = call.call([o.made(torch.Generator().manual_seed(0)) for o in call.operands()])
    fake = call.node(FakeTensorMode()).meta["val"]
    for have, want in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (made, fake)), strict=True
    ):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
