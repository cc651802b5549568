"""CTC loss as ops with static shapes, each sample by itself.

    tutti::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank,
                    zero_infinity) -> losses
    tutti::ctc_slopes(the same) -> losses, d losses / d log_probs

with log_probs (T, N, C), targets (N, S), both lengths (N,), losses (N,) and slopes (T, N, C). ATen's op
saves a table for its backward whose size depends on the longest target of the batch. So `ctc_slopes`
computes the gradient at once, for a gradient of 1 of each loss; the backward is then a product. ATen
multiplies by the gradient of the loss last, so the result is the same to the bit. With `zero_infinity`
the slopes of an infinite loss are zeros; the loss itself stays infinite.

Source: A. Graves et al., Connectionist Temporal Classification, ICML 2006.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_OPERANDS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity"
)
_LIBRARY.define(f"ctc_loss({_OPERANDS}) -> Tensor")
_LIBRARY.define(f"ctc_slopes({_OPERANDS}) -> (Tensor, Tensor)")
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, int, bool]


def _loss(*given: *_Operands) -> Tensor:
    return aten._ctc_loss.Tensor(*given)[0]


def _slopes(*given: *_Operands) -> tuple[Tensor, Tensor]:
    losses, table = aten._ctc_loss.Tensor(*given)
    operands, how = given[:4], given[4:]
    ones = torch.ones_like(losses)
    return losses, aten._ctc_loss_backward.Tensor(ones, *operands, losses, table, *how)


def _fake_loss(*given: *_Operands) -> Tensor:
    return given[0].new_empty(given[0].shape[1])


def _fake_slopes(*given: *_Operands) -> tuple[Tensor, Tensor]:
    return _fake_loss(*given), given[0].new_empty(given[0].shape)


_LIBRARY.impl("ctc_loss", _loss, "CompositeExplicitAutograd")
_LIBRARY.impl("ctc_slopes", _slopes, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::ctc_loss", _fake_loss, lib=_LIBRARY)
torch.library.register_fake("tutti::ctc_slopes", _fake_slopes, lib=_LIBRARY)

ctc_loss = torch.ops.tutti.ctc_loss.default
ctc_slopes = torch.ops.tutti.ctc_slopes.default
