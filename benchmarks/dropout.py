"""Dropout with a mask that does not depend on the layout, against PyTorch's own, side by side.

    python -m benchmarks.dropout

One thread; the ways alternate, and their medians are compared. `ready` reuses the block's hash
inputs, as a step that runs many times does; `fresh` computes them at every call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command_line import parser
from tutti.graph.randomness import random

P = 0.1
SHAPES = ((64, 64), (256, 256), (1024, 1024), (2**20,), (16, 4, 128, 128), (10, 1024, 1024))


def contenders(shape: tuple[int, ...]) -> dict[str, Callable[[], Tensor]]:
    """Three ways to drop out a float tensor of this shape."""
    x = torch.randn(shape)
    index = [torch.arange(size) for size in shape]
    block, key = random.RandomBlock.of(index, shape, "cpu"), random.key(0, 1, 2)
    scale = 1 / (1 - P)
    return {
        "torch": lambda: F.dropout(x, P, training=True),
        "ready": lambda: (x * random.keep_mask(key, block, shape, P)).mul_(scale),
        "fresh": lambda: (x * random.keep_mask(key, index, shape, P)).mul_(scale),
    }


def medians(ways: Mapping[str, Callable[[], Tensor]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turn after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 2):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def main() -> None:
    """Print a line per shape."""
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    print(
        f"{'shape':<20}{'F.dropout ms':>13}{'ready ms':>10}{'ratio':>7}{'fresh ms':>10}{'ratio':>7}"
    )
    for shape in SHAPES:
        num_rounds = max(7, min(1000, 2**25 // torch.Size(shape).numel()))
        plain, ready, fresh = medians(contenders(shape), num_rounds).values()
        name = " x ".join(map(str, shape))
        print(
            f"{name:<20}{plain * 1e3:>13.3f}{ready * 1e3:>10.3f}{ready / plain:>7.2f}"
            f"{fresh * 1e3:>10.3f}{fresh / plain:>7.2f}"
        )


if __name__ == "__main__":
    main()
