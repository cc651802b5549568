"""`draw`: the one random op of a captured graph.

A graph holds `draw(kind, shape, params, dtype, device, stream)`. Its value is a function of the run's seed,
the step, the stream (which random op of the step it is) and each element's global index; so it does not
depend on the sharding of the tensor. The seed and the step are not in the graph: the engine that runs it
gives them.

| kind | params | value |
| --- | --- | --- |
| `bernoulli` | p | 1 with probability p, else 0 |
| `uniform` | low, high | uniform in [low, high) |
| `normal` | mean, std | normal |
| `randint` | low, high | whole number in [low, high) |
| `permutation` | | a random order of 0..n-1; whole dims only |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.graph.randomness import random

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define(
    "draw(str kind, SymInt[] shape, float[] params, ScalarType dtype, Device device, int stream)"
    " -> Tensor"
)


@torch.library.register_fake("tutti::draw", lib=_LIBRARY)
def _fake_draw(kind, shape, params, dtype, device, stream):
    return torch.empty(shape, dtype=dtype, device=device)


draw = torch.ops.tutti.draw.default


def drawn(
    kind: str,
    params: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
    key: int,
    index: Sequence[Tensor],
    shape: Sequence[int],
) -> Tensor:
    """The values of one block: `index[d]` holds the block's global indices along dim d of `shape`."""
    match kind:
        case "bernoulli":
            mask = random.keep_mask(key, index, shape, 1.0 - params[0], device)
            return mask if dtype == torch.bool else mask.to(dtype)
        case "uniform":
            low, high = params
            x = random.uniform(key, index, shape, dtype, device)
            return x if (low, high) == (0.0, 1.0) else x.mul_(high - low).add_(low)
        case "normal":
            mean, std = params
            x = random.normal(key, index, shape, dtype, device)
            return x if (mean, std) == (0.0, 1.0) else x.mul_(std).add_(mean)
        case "randint":
            low, high = int(params[0]), int(params[1])
            return random.randint(key, index, shape, low, high, device).to(dtype)
        case "permutation":
            return random.permutation(key, shape[0], device).to(dtype)
    raise AssertionError(kind)
