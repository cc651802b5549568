"""Sample calls of the CTC loss; see `rules.samples`."""

from __future__ import annotations

import torch

from tutti.graph.ops.ctc import ctc_loss, ctc_slopes
from tutti.rules.samples.sample import Operand, Sample, f, ints

_TIME, _SAMPLES, _CLASSES, _LONGEST, _BLANK = 7, 12, 5, 3, 4


def _lengths(low: int, high: int, dtype: torch.dtype = torch.int64) -> Operand:
    return Operand((_SAMPLES,), dtype, lambda s, g: torch.randint(low, high + 1, s, generator=g))


def _call(op: object, shortest: int, zero_infinity: bool, dtype: torch.dtype) -> Sample:
    """With a short input some samples have no path: their loss is infinite."""
    log_probs, targets = f(_TIME, _SAMPLES, _CLASSES), ints(_BLANK, _SAMPLES, _LONGEST)
    lengths = (_lengths(shortest, _TIME, dtype), _lengths(0, _LONGEST, dtype))
    return Sample(op, (log_probs, targets, *lengths, _BLANK, zero_infinity))


CTC = [
    _call(op, shortest, zero_infinity, dtype)
    for op in (ctc_loss, ctc_slopes)
    for shortest, zero_infinity, dtype in ((7, False, torch.int64), (1, True, torch.int32))
]
