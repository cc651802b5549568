"""Fourier transforms: the transformed dims stay whole, the others split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.rules.rule import Rule, Term, groups, shape

aten = torch.ops.aten


def _transform(node: fx.Node) -> Rule:
    """Real to complex, complex to complex or back: a sum over each line of the transformed dims."""
    x = shape(node.args[0])
    given: Any = node.args[1]
    dims = {d % len(x) for d in given}
    term: Term = tuple(() if i in dims else (f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": n for i, n in enumerate(x) if i not in dims}
    return Rule((term,), (term,), sizes, linear=groups((0,)))


RULES = {
    aten._fft_r2c.default: _transform,
    aten._fft_c2c.default: _transform,
    aten._fft_c2r.default: _transform,
}
