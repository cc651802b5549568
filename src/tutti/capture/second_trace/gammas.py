"""Gamma and Dirichlet variables, and with them Beta, Chi2 and StudentT, in terms of `draw`.

By rejection (Marsaglia, Tsang, "A simple method for generating gamma variables", 2000), as PyTorch samples,
but with the same number of proposals for each element. For a shape a >= 1, d = a - 1/3, c = 1 / sqrt(9 d):

    v = (1 + c z)^3, z normal       d v is the value if log(u) < z^2 / 2 + d - d v + d log(v), u uniform

and for a < 1 the value of a + 1 times u^(1/a). The first accepted proposal counts. At least 95 % are
accepted: none of an element's is once in 3e10 values, which 32 random bits could not tell; its value is d.
In float64, so that rounding accepts the same proposals in each layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Draw = Callable[..., Tensor]
NUM_PROPOSALS = 8


def standard_gamma(draw: Draw, shapes: Tensor, **_: Any) -> Tensor:
    """A value of each of `shapes`, the parameters of the distributions, which have a scale of 1."""
    least = torch.finfo(shapes.dtype).tiny  # as PyTorch: a density may be infinite at 0
    return _logs(draw, shapes).exp().to(shapes.dtype).clamp(min=least)


def dirichlet(draw: Draw, shapes: Tensor, **_: Any) -> Tensor:
    """Gamma variables over their sum along the last dim; by logarithms, since all may be close to 0."""
    least = torch.finfo(shapes.dtype).tiny
    return _logs(draw, shapes).softmax(-1).to(shapes.dtype).clamp(min=least)


def _logs(draw: Draw, shapes: Tensor) -> Tensor:
    a = shapes.double()
    wide = [*shapes.shape, 2 * NUM_PROPOSALS + 1]
    u = draw("uniform", wide, [0.0, 1.0], torch.float64, shapes.device) + 2.0**-25  # none is 0
    d = torch.where(a < 1, a + 1, a) - 1 / 3
    v, accepted = _proposals(d.unsqueeze(-1), u)
    first = accepted.to(torch.int8).argmax(-1, keepdim=True)
    chosen = torch.where(accepted, v, 1.0).gather(-1, first).squeeze(-1)
    return (d * chosen).log() + torch.where(a < 1, u[..., -1].log() / a, 0.0)


def _proposals(d: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The proposals v of each element along the last dim, and which of them are accepted."""
    z = torch.erfinv(2 * u[..., :NUM_PROPOSALS] - 1) * math.sqrt(2)
    v = (1 + z / (9 * d).sqrt()) ** 3
    bound = z.square() / 2 + d * (1 - v + v.clamp(min=1e-300).log())
    return v, (v > 0) & (u[..., NUM_PROPOSALS:-1].log() < bound)
