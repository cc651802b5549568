"""The cost of one placement under a layout, from its counted program.

seconds  =  kernels and collectives of forward and backward, on a rank's part of the batch
          + sums of gradients over the axes of the batch that nothing runs beside
          + the update's reads and writes of the state
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tutti.capture.captured import Captured
from tutti.costs.graph_seconds import CollectiveCall
from tutti.layout import Layout, Sharding
from tutti.planner.estimates.graph_clock import OVERLAP_SLOWDOWN
from tutti.planner.placement.counted_programs import NO_NODE, CountedProgram, CountedPrograms
from tutti.planner.placement.reduced import stands_for
from tutti.planner.placement.yardstick import Yardstick
from tutti.propagate.storage_sharding import further_axes

# The share of the backward in the time of both passes.
_BACKWARD = 2 / 3
# Axes that split the batch: their ranks share activations and their work.
_BATCH_AXES = ("data", "seq")


@dataclass(frozen=True)
class PlacedCost:
    """What a placement costs a rank in a step.

    Args:
        seconds: of the step, predicted.
        sent_nbytes: bytes that a rank sends in forward and backward over the axes of the weights.
        counts: by region and kind the number of collectives of floating values.
        memory_nbytes: state, gradients and the activations that the backward reads.
        shardings: by parameter of the reduced step, those that split it.
        gathered: parameters that an op needs otherwise than they are split.
    """

    seconds: float
    sent_nbytes: float
    memory_nbytes: float
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()


class Costing:
    """Costs of placements of one step under one layout.

    Args:
        captured: the whole step.
        programs: of placements of its reduced form.
        layout: of the run.
        yardstick: gives seconds.
    """

    def __init__(
        self, captured: Captured, programs: CountedPrograms, layout: Layout, yardstick: Yardstick
    ) -> None:
        self.programs, self.layout, self.yardstick = programs, layout, yardstick
        self.step = programs.step
        self.share = 1.0 / math.prod(layout.axes.get(a, 1) for a in _BATCH_AXES)
        self.slots = _slot_nbytes(captured)
        self.weights = dict(_parameters(captured))
        self.num_dims = {n: self.weights[n].ndim for n in self.step.kinds}
        # For how many weights of the whole model each stands, if the captured step is that of a shorter one.
        self.times = {n: stands_for(captured.placeholders[n]) for n in self.weights}
        self._found: dict[tuple[tuple[str, str], ...], PlacedCost] = {}

    def of(self, place: Mapping[str, str]) -> PlacedCost:
        """The cost of shardings by parameter of the reduced step; a search asks for each many times."""
        key = tuple(sorted(place.items()))
        if key not in self._found:
            self._found[key] = self._cost(self.programs.of(place))
        return self._found[key]

    def _cost(self, made: CountedProgram) -> PlacedCost:
        collectives = sum(n * self.yardstick.collective(c, self.share) for c, n in made.calls)
        computing = self.share * made.kernel_seconds
        local, axes = self._local_nbytes(made), self._zero_axes(made)
        parts = self._parts(local, axes)
        return PlacedCost(
            seconds=computing
            + collectives
            + self._update_seconds(parts if self.layout.zero else local)
            + self._summing(local, axes, computing),
            sent_nbytes=sum(n * self.share * self.yardstick.sent(c) for c, n in made.calls),
            memory_nbytes=self._state_nbytes(local, parts) + self.share * made.kept_nbytes,
            shardings={n: s for n, s in made.shardings.items() if s.axes},
            counts=made.counts,
            gathered=made.gathered,
        )

    def _local_nbytes(self, made: CountedProgram) -> dict[str, float]:
        """The bytes of each parameter of the whole step on a rank."""
        found = {}
        mesh = self.programs.own.program_mesh
        for name, sharding in made.shardings.items():
            ways = mesh.size(sharding.axes)
            members = self.step.members[name]
            found |= {m: self.times[m] * self.weights[m].nbytes / ways for m in members}
        return found

    def _zero_axes(self, made: CountedProgram) -> dict[str, tuple[str, ...]]:
        """The axes over which `zero` shards the state of each parameter of the whole step."""
        mesh, every, found = self.layout.mesh, self.layout.zero_axes, {}
        for name, sharding in made.shardings.items():
            axes = further_axes(sharding, mesh, every)
            found |= dict.fromkeys(self.step.members[name], axes)
        return found

    def _parts(
        self, local: Mapping[str, float], axes: Mapping[str, tuple[str, ...]]
    ) -> dict[str, float]:
        """The bytes of a rank's part of each parameter, if `zero` shards it over these axes."""
        return {name: n / self.layout.mesh.size(axes[name]) for name, n in local.items()}

    def _update_seconds(self, nbytes: Mapping[str, float]) -> float:
        """Seconds of the update's reads and writes."""
        read = sum((3 + 2 * self._slots(name)) * n for name, n in nbytes.items())
        return self.yardstick.memory(read)

    def _summing(
        self,
        local: Mapping[str, float],
        axes: Mapping[str, tuple[str, ...]],
        computing: float,
    ) -> float:
        """Seconds of sums of gradients over the axes of the batch: after the last micro-batch, or beside the
        backward."""
        nbytes: Counter[tuple[str, ...]] = Counter()
        for name, n in local.items():
            nbytes[axes[name]] += n  # type: ignore[assignment]
        seconds = sum(
            self.yardstick.collective(CollectiveCall(NO_NODE, "all_reduce", int(n), over))
            for over, n in nbytes.items()
            if over and n
        )
        if self.layout.micro > 1 and self.layout.zero < 2:
            return seconds
        hidden = min(self.layout.micro * seconds, _BACKWARD * computing)
        return self.layout.micro * seconds - hidden + hidden * (1 - 1 / OVERLAP_SLOWDOWN)

    def _state_nbytes(self, local: Mapping[str, float], parts: Mapping[str, float]) -> float:
        """Bytes of weights, gradients and slots."""
        zero = self.layout.zero
        weights, of_slots = parts if zero >= 3 else local, parts if zero >= 1 else local
        slots = sum((1 + self._slots(name)) * n for name, n in of_slots.items())
        return sum(weights.values()) + slots

    def _slots(self, name: str) -> float:
        """Bytes of its slots for each byte of a parameter."""
        return self.slots.get(name, 0.0) / max(1, self.weights[name].nbytes)


def _slot_nbytes(captured: Captured) -> dict[str, float]:
    found: dict[str, float] = {}
    for state in captured.state:
        if state.kind == "slot":
            found[state.owner] = found.get(state.owner, 0.0) + state.tensor.nbytes
    return found


def _parameters(captured: Captured) -> Iterable[tuple[str, Tensor]]:
    nodes = captured.placeholders
    return ((n, nodes[n].meta["val"]) for n, kind in captured.kinds.items() if kind == "parameter")
