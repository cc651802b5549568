"""Tensor parallelism on DTensor.

As https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html says: column- and row-wise linear layers
in each block, a row-wise embedding and a column-wise head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.contenders import gloo
from benchmarks.contenders.contender import Batches, Contender, Place
from benchmarks.contenders.eager import Eager
from benchmarks.models import Case, optimizer


def plan(case: Case) -> dict[str, ParallelStyle]:
    """The style of each module by the pattern of its name."""
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in case.columns}
    styles |= {name: RowwiseParallel() for name in case.rows}
    styles[case.embedding] = RowwiseParallel(input_layouts=Replicate())
    styles[case.head] = ColwiseParallel(output_layouts=Replicate())
    return styles


def build(case: Case, place: Place) -> Contender:
    """Each rank has a part of the heads, hidden units and vocabulary; all see the same batch."""
    model = parallelize_module(case.model(), gloo.mesh(place), plan(case))
    return Eager(case, model, _optimizer(model), Batches(case, 1))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Whole weights (norms, positions) in a group of their own: one fused call takes one kind of tensor."""
    made = optimizer(model)
    (group,) = made.param_groups
    split = [p for p in group["params"] if isinstance(p, DTensor)]
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    group["params"] = split
    made.add_param_group({"params": whole})
    return made
