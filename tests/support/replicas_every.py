"""What the tests of all strategies share: the strategies, replicas with weights, and a run of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutti.replicas.strategies import parse
from tutti.replicas.strategy import Weights
from tutti.replicas.virtual_replicas import Replicas

# Each with the number of replicas it is tried with. None sends compressed messages.
EXACT = [
    ("average(every=1)", 2),
    ("average(every=3)", 3),
    ("average(every=2, then=4)", 4),
    ("average(every=4, then=8, group=3)", 6),
    ("average(every=4, after=5)", 2),
    ("diloco(every=3)", 2),
    ("diloco(every=4, lr=1.0, momentum=0.0)", 3),
    ("diloco(every=4, fragments=3, momentum=0.5)", 4),
    ("diloco(every=4, fragments=2, delay=3)", 2),
    ("diloco(every=4, fragments=2, delay=1, after=3)", 3),
    ("gossip(every=1)", 2),
    ("gossip(every=2)", 3),
    ("gossip(every=1, delay=2)", 4),
    ("gossip(every=1)", 5),
    ("gossip(every=3, delay=1)", 8),
]
# Without waiting; played here in the order of replicas.
CALLED = [
    ("elastic(every=1)", 2),
    ("elastic(every=3, beta=0.5)", 3),
    ("elastic(every=2)", 5),
    ("pairs(every=1)", 2),
    ("pairs(every=2)", 3),
    ("pairs(every=1)", 5),
]
COMPRESSED = [
    ("average(every=2, traffic=bf16)", 2),
    ("average(every=2, traffic=int8)", 3),
    ("diloco(every=3, traffic=bf16)", 2),
    ("diloco(every=2, fragments=2, delay=1, traffic=int8)", 4),
]
NAMES = ["embed.weight", "up.weight", "up.bias", "norm.weight", "head.weight"]
SHAPES = [(7, 4), (3, 4), (3,), (4,), (2, 4)]
Local = Callable[
    [int, int, Weights], Weights
]  # (replica, step, weights) to what a step makes of them


def some_weights(seed: int) -> Weights:
    """Random weights in float64."""
    chance = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(shape, generator=chance, dtype=torch.float64)
        for n, shape in zip(NAMES, SHAPES, strict=True)
    }


def still(replica: int, step: int, weights: Weights) -> Weights:
    """A step without a gradient."""
    return weights


def descending(replica: int, step: int, weights: Weights) -> Weights:
    """A step of gradient descent on a square of each replica's own."""
    targets = some_weights(1000 + replica)
    return {n: x - 0.1 * (x - targets[n]) for n, x in weights.items()}


def play(text: str, weights: list[Weights], steps: int, local: Local) -> list[list[Weights]]:
    """The weights of every replica after each step; those given come first."""
    replicas = Replicas(parse(text), NAMES, weights)
    seen = [weights]
    for step in range(1, steps + 1):
        moved = [local(r, step, dict(own)) for r, own in enumerate(seen[-1])]
        changed = replicas.after(step, moved)
        seen.append([own | new for own, new in zip(moved, changed, strict=True)])
    return seen


def mean_of(weights: list[Weights]) -> Weights:
    """The mean over replicas."""
    return {n: torch.stack([own[n] for own in weights]).mean(0) for n in NAMES}


def spread_of(weights: list[Weights]) -> float:
    """How far replicas are from each other at most."""
    return max(float((own[n] - weights[0][n]).abs().max()) for own in weights for n in NAMES)


def difference(a: Weights, b: Weights) -> float:
    """The largest difference of two sets of weights."""
    return max(float((a[n] - b[n]).abs().max()) for n in NAMES)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(tensors).sum(0)
