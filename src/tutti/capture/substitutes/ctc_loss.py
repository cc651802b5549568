"""`torch.ctc_loss` as tutti's ops, whose results have shapes that do not depend on values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.errors import CaptureError
from tutti.graph.ops.ctc import ctc_loss, ctc_slopes
from tutti.user_lines import quoted, user_line

Lengths = Tensor | Sequence[int]


def _operands(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = (input_lengths.reshape(-1), target_lengths.reshape(-1))
    targets = _in_rows(targets, lengths[1]) if targets.dim() == 1 else targets
    return log_probs, targets, *lengths


def losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The losses, and the slopes in place of ATen's saved values for its backward."""
    given = _operands(log_probs, targets, input_lengths, target_lengths)
    if log_probs.requires_grad:
        return ctc_slopes(*given, blank, zero_infinity)
    return ctc_loss(*given, blank, zero_infinity), log_probs.new_empty(())


def losses_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    _losses: Tensor,
    slopes: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """The slopes times the gradient of the losses, also after a forward without gradients."""
    if slopes.dim() == 0:
        given = _operands(log_probs, targets, input_lengths, target_lengths)
        _, slopes = ctc_slopes(*given, blank, zero_infinity)
    return slopes * grad.unsqueeze(-1)


_PLAIN: Any = torch.ctc_loss


def loss_of(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    *how: Any,
    **named: Any,
) -> Tensor:
    """`torch.ctc_loss` with lists of lengths as tensors (N,), which split as the batch does."""
    if not isinstance(input_lengths, Tensor) and not isinstance(target_lengths, Tensor):
        if targets.dim() == 1:
            targets = _in_rows(targets, target_lengths)
        input_lengths, target_lengths = (
            torch.tensor(list(x), dtype=torch.int64, device=log_probs.device)
            for x in (input_lengths, target_lengths)
        )
    return _PLAIN(log_probs, targets, input_lengths, target_lengths, *how, **named)


def _in_rows(targets: Tensor, lengths: Lengths) -> Tensor:
    """Concatenated targets as rows (N, S) of the largest possible length.

    No op reads a row beyond its sample's length.
    """
    if isinstance(lengths, Tensor):
        longest, counts = targets.shape[0], lengths.to(torch.int64)
    else:
        _refuse_other_total(targets.shape[0], lengths)
        longest, counts = max(lengths), torch.tensor(list(lengths), device=targets.device)
    starts = (counts.cumsum(0) - counts).unsqueeze(1)
    within = torch.arange(longest, device=targets.device).unsqueeze(0)
    # a length that does not fit is an index beyond the targets, which raises when the step runs
    index = torch.where(within < counts.unsqueeze(1), starts + within, 0)
    return targets[index]


def _refuse_other_total(num_targets: int, lengths: Sequence[int]) -> None:
    if sum(lengths) != num_targets:
        raise CaptureError(
            f"the target lengths add up to {sum(lengths)}, and there are {num_targets} targets",
            at=quoted(user_line()),
            why="targets of one dim lie one sample's after the other's",
            fix="lengths that add up to the number of targets, or targets of shape (samples, longest)",
        )


def no_cudnn(*_given: Any) -> bool:
    """Turn off cuDNN's CTC loss, which reads lengths on the host and calls other ops."""
    return False
