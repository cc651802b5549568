"""A closer comparison of two runs that differ: part by part, each from the same values.

A gradient that is zero in exact arithmetic (a bias of attention's keys, a bias before BatchNorm) is rounding
in every program, another one in each; an optimizer that divides by its size makes a full update of it. So

    state before the step -----------> gradients    each on the scale of gradients
    state and the other's gradients -> new state    each on its own scale

If even that differs, the device runs again with errors of the size of rounding (`graph.players.rounding`).
Their effect on an entry explains a difference of that size, but never more than a share of a tensor: the
square root of the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.graph.players.rounding import Rounding
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.verification.comparisons import (
    FLOOR,
    Errors,
    Made,
    differences,
    is_rounded,
    largest,
)

# The number of samples of rounding, and the greatest difference of a right program as a multiple of theirs.
SAMPLES, FACTOR = 4, 16.0


@dataclass
class OneDevice:
    """A graph on one device, whose updates take the gradients of another run.

    marks: the inputs of updates, by the name of the gradient.
    """

    graph: fx.Graph
    owner: nn.Module
    updated: Sequence[str]
    marks: Mapping[str, fx.Node]
    seed: int

    def play(
        self, k: int, inputs: list[Any], given: Mapping[str, Tensor], noise: Rounding | None = None
    ) -> Made:
        """Step `k`; its results include its own gradients, its new state comes from those `given`."""
        names: dict[fx.Node, list[str]] = {}
        for name, node in self.marks.items():
            names.setdefault(node, []).append(name)
        own: dict[str, Tensor] = {}

        def change(node: fx.Node, values: list[Any]) -> list[Any]:
            if noise is not None:
                values = [noise.of(node, x) for x in values]
            for name in names.get(node, ()):
                own[name] = values[0]
            taken = [given[name] for name in names.get(node, ()) if name in given]
            return [taken[0].to(values[0].dtype)] if taken else values

        ranks = VirtualRanks(Mesh(), seed=self.seed, step=k)
        returned, new = ranks.run(self.graph, self.owner, [inputs], change=change)[0]
        return Made(returned, own, dict(zip(self.updated, new, strict=True)))


@dataclass
class Aligned:
    """Compares a device with another run, step by step.

    tolerance: of `errors`.
    scales: of new state, by name, from the device's results for the state before.
    """

    device: OneDevice
    tolerance: float
    scales: Callable[[Made, Mapping[str, Tensor]], dict[str, float]]
    errors: Errors = field(default_factory=Errors)

    def step(self, k: int, inputs: list[Any], before: Mapping[str, Tensor], other: Made) -> Made:
        """Compare step `k` of both from state `before`; the device's results."""
        own = self.device.play(k, inputs, other.gradients)
        scales = _gradient_scales(own) | _returned_scales(own) | self.scales(own, before)
        theirs = dict(other.values())
        found = {n: differences(theirs[n], x) for n, x in own.values() if n in theirs}
        found = {n: d for n, d in found.items() if d.numel()}
        moved: dict[str, Tensor] = {}
        if not all(float(d.max()) <= self.tolerance * scales[n] for n, d in found.items()):
            moved = self._moved(k, inputs, own, other.gradients)
        for name, d in found.items():
            scale = torch.full_like(d, max(scales[name], 1e-300))
            if name in moved:
                most = scales[name] * self.tolerance**0.5
                scale = (FACTOR * moved[name]).clamp(max=most).div(self.tolerance).maximum(scale)
            self.errors.add(f"{name} (step {k})", (d / scale).max(), 1.0)
        return own

    def _moved(
        self, k: int, inputs: list[Any], own: Made, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The greatest change of each entry by samples of rounding."""
        base = dict(own.values())
        moved = {n: torch.zeros_like(differences(x, x)) for n, x in base.items()}
        for sample in range(SAMPLES):
            made = self.device.play(k, inputs, given, Rounding(sample))
            for name, x in made.values():
                moved[name] = moved[name].maximum(differences(x, base[name]).nan_to_num(0.0, 0.0))
        return moved


def _gradient_scales(own: Made) -> dict[str, float]:
    """The scale of each, or a small part of the largest: all entries of one may be rounding."""
    sizes = {n: largest(x) for n, x in own.gradients.items()}
    whole = (sizes[n] for n, x in own.gradients.items() if x.ndim and is_rounded(x))
    floor = FLOOR * max(whole, default=0.0)
    return {f"the gradient {n}": max(size, floor) for n, size in sizes.items()}


def _returned_scales(own: Made) -> dict[str, float]:
    pairs = [(i, x) for i, x in enumerate(own.returned) if isinstance(x, Tensor)]
    return {f"returned value {i}": largest(x) for i, x in pairs}
