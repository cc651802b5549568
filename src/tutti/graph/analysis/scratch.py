"""Scratch memory of an op, beside its operands and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tutti.graph.analysis.collective_scratch import borrowed_by_move, is_move
from tutti.graph.analysis.convolution_scratch import convolution, convolution_backward
from tutti.graph.analysis.storage import Storages
from tutti.graph.ops import collectives
from tutti.graph.ops.ctc import ctc_loss, ctc_slopes
from tutti.graph.ops.expert_rows import (
    expert_mm,
    expert_outer,
    expert_slots,
    from_experts,
    to_experts,
    to_filled,
)
from tutti.graph.ops.matmul import matmul
from tutti.graph.randomness.draw import draw
from tutti.graph.randomness.random import CHUNK_CPU

aten = torch.ops.aten
_INT32, _INT64 = 4, 8


def borrowed(node: fx.Node, storages: Storages) -> int:
    """Bytes of scratch memory that `node` holds while it runs.

    Measured on CPUs, where PyTorch's allocator sees them; a GPU's libraries keep their own workspaces.
    """
    borrow = _BORROWED.get(node.target)
    if borrow is None and not is_move(node):
        return 0
    operands, result = map_arg(node.args, storages.fakes.__getitem__), storages.fakes[node]
    return borrowed_by_move(node, operands, result) if borrow is None else borrow(operands, result)


def _matmul(operands: tuple[Any, ...], result: Any) -> int:
    """A contiguous copy of a transposed left operand; strips of the right one are small."""
    return 0 if operands[0].is_contiguous() else operands[0].nbytes


def _elements(operands: tuple[Any, ...], result: Any) -> int:
    """The loss of each element, before the sum, where the result is one number."""
    return 0 if result.dim() else operands[0].nbytes


def _grad_copy(operands: tuple[Any, ...], result: Any) -> int:
    return operands[0].nbytes


def _paths(operands: tuple[Any, ...], result: Any) -> int:
    """The table of CTC paths, by time and position in the target; no target is longer than its time."""
    log_probs, targets = operands[:2]
    time, samples, _ = log_probs.shape
    return time * samples * (2 * min(time, targets.shape[1]) + 1) * log_probs.element_size()


def _paths_both_ways(operands: tuple[Any, ...], result: Any) -> int:
    return 2 * _paths(operands, result)


def _hash(operands: tuple[Any, ...], result: Any) -> int:
    """The hash and its scratch, a chunk at a time; and the mask, where the result is not boolean."""
    mask = 0 if result.dtype == torch.bool else result.numel()
    return 2 * _INT32 * min(result.numel(), CHUNK_CPU) + mask


def _expert_mm(operands: tuple[Any, ...], result: Any) -> int:
    """The filled rows sorted by expert, their products, and these in one piece."""
    return (operands[0].nbytes + 2 * result.nbytes) // operands[5]


def _expert_outer(operands: tuple[Any, ...], result: Any) -> int:
    """The filled rows of both operands, sorted by expert."""
    return (operands[0].nbytes + operands[1].nbytes) // operands[5]


def _positions(operands: tuple[Any, ...], result: Any) -> int:
    """Of each row in each group, counted twice."""
    experts, _, groups = operands[:3]
    return 2 * _INT64 * experts.numel() * groups


def _from_experts(operands: tuple[Any, ...], result: Any) -> int:
    """The rows, before those without an expert become zeros; by then the positions are gone."""
    return max(result.nbytes, _positions(operands[1:], result))


Borrow = Callable[[tuple[Any, ...], Any], int]
_BORROWED: dict[Any, Borrow] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_batch_norm_backward.default: _grad_copy,
    aten.mse_loss.default: _elements,
    aten.smooth_l1_loss.default: _elements,
    aten.huber_loss.default: _elements,
    ctc_loss: _paths,
    ctc_slopes: _paths_both_ways,
    draw: _hash,
    matmul: _matmul,
    expert_mm: _expert_mm,
    expert_outer: _expert_outer,
    expert_slots: _positions,
    to_experts: lambda operands, result: _positions(operands[1:], result),
    to_filled: lambda operands, result: _positions(operands[1:], result),
    from_experts: _from_experts,
    collectives.draw_part: _hash,
}
