"""The cost of one placement, counted from the program that propagate and partition write for it.

seconds  =  kernels and collectives of forward and backward, on a rank's part of the batch
          + sums of gradients over `data`  +  the update's reads and writes of the state
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, fx

from tutti.capture.step import Captured, copied
from tutti.graph.analysis.aliases import aliased
from tutti.layout import Layout, Sharding
from tutti.partition.choose import Chooser
from tutti.partition.partition import Program, partition
from tutti.planner.costs.graph_seconds import CollectiveCall, work_of
from tutti.planner.placement.reduced import TIMES, ReducedStep
from tutti.planner.placement.yardstick import Yardstick, sent_nbytes
from tutti.propagate.batch_dim import Dims
from tutti.propagate.plan import Place, plan
from tutti.rules.book import Book
from tutti.torch_private.pytrees import tree_leaves

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
    """Costs of placements of one step; each is counted once.

    Args:
        captured: the whole step.
        step: its reduced form.
        layout: of the run.
        yardstick: gives seconds.
        given: the user's `place`; dims: the dims of samples, if told.
    """

    def __init__(
        self,
        captured: Captured,
        step: ReducedStep,
        layout: Layout,
        yardstick: Yardstick,
        *,
        given: Place,
        known: Mapping[str, Sharding],
        dims: Dims | None,
        axes: Iterable[str],
    ) -> None:
        self.step, self.layout, self.yardstick = step, layout, yardstick
        self.given, self.known, self.dims = given, known, dims
        self.own = Layout(axes={a: layout.axes[a] for a in axes})
        self.share = 1.0 / math.prod(layout.axes.get(a, 1) for a in _BATCH_AXES)
        self.slots = _slot_nbytes(captured)
        self.weights = dict(_parameters(captured))
        self.num_dims = {n: self.weights[n].ndim for n in step.kinds}
        self.found: dict[tuple[tuple[str, str], ...], PlacedCost] = {}
        self.num_counted = 0
        self._book, self._chooser = Book(), Chooser(self.own.program_mesh)

    def of(self, place: Mapping[str, str]) -> PlacedCost:
        """The cost of shardings by parameter of the reduced step."""
        key = tuple(sorted(place.items()))
        if key not in self.found:
            self.num_counted += 1
            self.found[key] = self._counted(self._program(place))
        return self.found[key]

    def _program(self, place: Mapping[str, str]) -> Program:
        captured = copied(self.step.captured)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = {n: s for n, s in self.known.items() if n in captured.kinds}
            rest = {"known": known, "dims": self.dims, "found": place, "book": self._book}
            made = plan(captured, self.own, self.given, **rest)
            made.patterns.clear()  # a weight that an op cannot take is gathered, at a cost
            return partition(made, chooser=self._chooser)

    def _counted(self, program: Program) -> PlacedCost:
        times = _Times(program)
        work = work_of(program.graph)
        seconds = sum(
            self.share * times.of(k.node) * self.yardstick.kernel(k)
            for k in work.kernels
            if k.node.meta.get("region") != "update"
        )
        calls = [(c, times.of_call(c.node)) for c in work.calls]
        seconds += sum(n * self.yardstick.collective(c, self.share) for c, n in calls)
        compute = program.plan.compute
        local = self._local_nbytes(compute)
        seconds += self._state_seconds(local)
        return PlacedCost(
            seconds=seconds,
            sent_nbytes=sum(n * self._sent(c) for c, n in calls),
            memory_nbytes=self._state_nbytes(local) + self.share * _kept_nbytes(program, times),
            shardings={n: compute[n] for n in self.step.kinds if compute[n].axes},
            counts=_counts(calls),
            gathered=frozenset(map(partial(_gathered, program), (c.node for c, _ in calls))) - {""},
        )

    def _sent(self, call: CollectiveCall) -> float:
        return self.share * sent_nbytes(call, self.yardstick.group(call.axes).size)

    def _local_nbytes(self, compute: Mapping[str, Sharding]) -> dict[str, float]:
        """The bytes of each parameter of the whole step on a rank."""
        found = {}
        mesh = self.own.program_mesh
        for name in self.step.kinds:
            ways = mesh.size(compute[name].axes)
            found |= {m: self.weights[m].nbytes / ways for m in self.step.members[name]}
        return found

    def _state_seconds(self, local: Mapping[str, float]) -> float:
        """Sums of gradients over `data`, and the update."""
        data = self.layout.axes.get("data", 1)
        nbytes = sum(local.values())
        read = sum((3 + 2 * self._slots(name)) * n for name, n in local.items())
        seconds = self.yardstick.memory(read / (data if self.layout.zero else 1))
        if data > 1:
            call = CollectiveCall(_NO_NODE, "all_reduce", int(nbytes), ("data",))
            seconds += self.yardstick.collective(call)
        return seconds

    def _state_nbytes(self, local: Mapping[str, float]) -> float:
        data, zero = self.layout.axes.get("data", 1), self.layout.zero
        weights = sum(local.values())
        slots = sum(self._slots(name) * n for name, n in local.items())
        return (
            weights / (data if zero >= 3 else 1)
            + weights / (data if zero >= 1 else 1)
            + slots / (data if zero >= 1 else 1)
        )

    def _slots(self, name: str) -> float:
        """Bytes of its slots for each byte of a parameter."""
        return self.slots.get(name, 0.0) / max(1, self.weights[name].nbytes)


_NO_NODE: Any = None


def _gathered(program: Program, call: fx.Node) -> str:
    """The parameter that a collective moves in forward or backward, or a view of it; else ""."""
    value: fx.Node = call.meta["value"]
    while value not in program.plan.boundaries and aliased(value) is not None:
        value = aliased(value) or value
    kind = program.plan.boundaries.get(value)
    return kind.parameter if kind is not None else ""


def _counts(calls: Iterable[tuple[CollectiveCall, int]]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for call, times in calls:
        val = call.node.meta.get("val")
        if isinstance(val, Tensor) and not val.is_floating_point():
            continue  # a few numbers, for the collectives of others
        key = call.node.meta["user"].meta.get("region", "output"), call.kind
        found[key] = found.get(key, 0) + times
    return found


class _Times:
    """How many nodes of the whole step each node of a program stands for."""

    def __init__(self, program: Program) -> None:
        self._of_whole: dict[fx.Node, int] = {}
        self._local: dict[fx.Node, int] = {}
        for whole, local, _ in program.made:
            self._local.setdefault(local, self._whole(whole))

    def of(self, local: fx.Node) -> int:
        """Of a node of the program."""
        if local not in self._local:
            parts = [self._local[u] for u in local.users if u in self._local]
            self._local[local] = max(parts, default=1)
        return self._local[local]

    def of_call(self, call: fx.Node) -> int:
        """Of a collective: those of the op for which it is."""
        user: fx.Node = call.meta["user"]
        return self._whole(call.meta["value"] if user.op == "output" else user)

    def _whole(self, node: fx.Node) -> int:
        """A node that propagate has made has the times of its operands."""
        if TIMES in node.meta:
            return node.meta[TIMES]
        if node not in self._of_whole:
            self._of_whole[node] = max(map(self._whole, node.all_input_nodes), default=1)
        return self._of_whole[node]


def _kept_nbytes(program: Program, times: _Times) -> float:
    """Bytes of the results of the forward that the backward reads."""
    total = 0.0
    for node in program.graph.nodes:
        made_forward = node.op == "call_function" and node.meta.get("region") == "forward"
        if made_forward and any(u.meta.get("region") == "backward" for u in node.users):
            leaves = tree_leaves(node.meta["val"])
            total += times.of(node) * sum(x.nbytes for x in leaves if isinstance(x, Tensor))
    return total


def _slot_nbytes(captured: Captured) -> dict[str, float]:
    found: dict[str, float] = {}
    for state in captured.state:
        if state.kind == "slot":
            found[state.owner] = found.get(state.owner, 0.0) + state.tensor.nbytes
    return found


def _parameters(captured: Captured) -> Iterable[tuple[str, Tensor]]:
    nodes = captured.placeholders
    return ((n, nodes[n].meta["val"]) for n, kind in captured.kinds.items() if kind == "parameter")
