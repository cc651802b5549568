"""Repeats the two comparisons part by part (`aligned`), if a plain one finds a difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutti.capture.state.found_gradients import noted
from tutti.layout import assemble
from tutti.verification.aligned import Aligned, OneDevice
from tutti.verification.comparisons import (
    FLOOR,
    PARTITION_TOLERANCE,
    CaptureComparison,
    Made,
    PartitionComparison,
    inputs_of,
    is_rounded,
    kind_of,
    largest,
    largest_difference,
    scales_of,
    widened,
)
from tutti.verification.following import following
from tutti.verification.observed import Observed


class AlignedPartition(PartitionComparison):
    """The comparison of an `observed` program; the device begins each step with the ranks' state."""

    def __init__(self, seen: Observed, *rest: Any, **options: Any) -> None:
        super().__init__(*rest, **options)
        self._seen = seen
        graph, owner, back = self.wide
        new = {old.name: n for n, old in back.items()}
        marks = {name: new[value] for name, (value, _) in seen.gradients.items()}
        self._device = OneDevice(graph, owner, self.captured.updated, marks, self.seed)

    def advance(self, k: int) -> None:
        """Take step `k` on both sides, and compare."""
        pipe_ranks = self.play(k)
        count = len(pipe_ranks[0][0][0]) - len(self._seen.gradients)
        other = self._other(pipe_ranks, count, k)
        aligned = Aligned(self._device, PARTITION_TOLERANCE, _own_scales, self.errors)
        aligned.step(k, inputs_of(self.captured, self.one, self.feed), self.one, other)
        for pipe_rank, ranks in enumerate(pipe_ranks):
            for state, (returned, update) in zip(self.many[pipe_rank], ranks, strict=True):
                state |= dict(zip(self.played.updated[pipe_rank], update, strict=True))
                state |= following(self.captured, self.feed, returned[:count])[1]
        self.feed, others = following(self.captured, self.feed, other.returned)
        self.one |= other.state | others

    def compare_state(self, k: int) -> None:
        """Compare the work after a step from one state, too."""
        super().compare_state(k)
        for pipe_rank, ranks in enumerate(self.many):
            for name in self.played.updated[pipe_rank]:
                parts = [s[name] for s in ranks]
                self.one[name] = assemble(parts, self.program.storage[name], self.mesh)

    def _other(self, pipe_ranks: list[list[Any]], count: int, k: int) -> Made:
        """The ranks' results, whole."""
        lead = pipe_ranks[0][0][0]
        for returned, _ in (one for ranks in pipe_ranks for one in ranks):
            for i, (x, first) in enumerate(zip(returned[:count], lead[:count], strict=True)):
                if isinstance(x, Tensor):
                    error = largest_difference(x, first)
                    self.errors.see(f"returned value {i} (step {k})", error, largest(first))
        gradients = {
            name: self.whole(
                f"the gradient {name}", [r[0][count + i] for r in pipe_ranks[0]], sharding, k
            )
            for i, (name, (_, sharding)) in enumerate(self._seen.gradients.items())
        }
        state: dict[str, Tensor] = {}
        for pipe_rank, ranks in enumerate(pipe_ranks):
            for i, name in enumerate(self.played.updated[pipe_rank]):
                parts = [update[i] for _, update in ranks]
                state[name] = self.whole(name, parts, self.program.storage[name], k)
        return Made(lead[:count], gradients, state)


def _own_scales(own: Made, _before: Mapping[str, Tensor]) -> dict[str, float]:
    """Slots follow from equal gradients on both sides, so each has its own scale; a buffer of the forward,
    and a recomputed weight, may be rounding."""
    kinds = scales_of(own.state)
    return {
        n: max(largest(x), 0.0 if n.startswith("optim") else FLOOR * kinds.get(kind_of(n), 0.0))
        for n, x in own.state.items()
    }


class AlignedCapture:
    """The captured graph beside the eager step, with the gradients and new state of each step."""

    def __init__(self, plain: CaptureComparison) -> None:
        self._plain = plain
        captured = plain.captured
        marks = noted(captured.graph)
        device = OneDevice(captured.graph, captured.owner, captured.updated, marks, plain.seed)
        self._aligned = Aligned(device, plain.tolerance, _change_scales)
        self.errors = self._aligned.errors

    def run(self) -> None:
        """Compare every step of the eager side."""
        plain, state = self._plain, dict(self._plain.start)
        for k, eager in enumerate(plain.eager):
            inputs = inputs_of(plain.captured, state, plain.feeds[k])
            self._aligned.step(k, inputs, state, eager)
            state |= eager.state
            state |= following(plain.captured, plain.feeds[k], eager.returned)[1]


def _change_scales(own: Made, before: Mapping[str, Tensor]) -> dict[str, float]:
    """The scales of a step's changes, one for each kind."""
    changes = {n: widened(x) - widened(before[n]) for n, x in own.state.items()}
    kinds = scales_of(changes)
    return {
        n: max(kinds.get(kind_of(n), 0.0), _rounding(x) * 1e3 * largest(widened(x)))
        for n, x in own.state.items()
    }


def _rounding(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if is_rounded(x) else 0.0
