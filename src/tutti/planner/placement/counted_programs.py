"""The programs that propagate and partition write for placements: their kernels, collectives and bytes.

They depend on the sizes of the axes of the weights alone, so that layouts with other words share them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from tutti.capture.captured import copied
from tutti.costs.graph_seconds import CollectiveCall, work_of
from tutti.costs.kernels import DeviceKernel
from tutti.graph.analysis.aliases import aliased
from tutti.layout import Layout, Sharding
from tutti.partition.choose import Chooser
from tutti.partition.partition import Program, partition
from tutti.planner.placement.reduced import TIMES, ReducedStep
from tutti.propagate.batch_dim import Dims
from tutti.propagate.plan import Place, plan
from tutti.rules.book import Book
from tutti.torch_private.pytrees import tree_leaves


@dataclass(frozen=True)
class CountedProgram:
    """What is counted of one program, for the whole batch.

    Args:
        kernel_seconds: of forward and backward.
        calls: collectives, and how many of the whole step each stands for; without their nodes.
        kept_nbytes: activations that the backward reads.
        shardings: by parameter of the reduced step.
        counts: by region and kind the number of collectives of floating values.
        gathered: parameters that an op needs otherwise than they are split.
    """

    kernel_seconds: float
    calls: tuple[tuple[CollectiveCall, int], ...]
    kept_nbytes: float
    shardings: Mapping[str, Sharding]
    counts: Mapping[tuple[str, str], int]
    gathered: frozenset[str]


class CountedPrograms:
    """The programs of placements of one step; each is written once.

    Args:
        step: the reduced step.
        own: the axes of the weights, with their sizes.
        kernel: seconds of a kernel.
        given: the user's `place`; dims: the dims of samples, if told.
        known: compute shardings of an earlier step on the same model.
    """

    def __init__(
        self,
        step: ReducedStep,
        own: Layout,
        kernel: Callable[[DeviceKernel], float],
        *,
        given: Place,
        known: Mapping[str, Sharding],
        dims: Dims | None,
    ) -> None:
        self.step, self.own, self.given = step, own, given
        self._kernel, self._known, self._dims = kernel, known, dims
        self._found: dict[tuple[tuple[str, str], ...], CountedProgram] = {}
        self._book, self._chooser = Book(), Chooser(own.program_mesh)

    @property
    def num_counted(self) -> int:
        """How many programs have been written."""
        return len(self._found)

    def of(self, place: Mapping[str, str]) -> CountedProgram:
        """The program for shardings by parameter of the reduced step."""
        key = tuple(sorted(place.items()))
        if key not in self._found:
            self._found[key] = self._counted(self._program(place))
        return self._found[key]

    def _program(self, place: Mapping[str, str]) -> Program:
        captured = copied(self.step.captured)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = {n: s for n, s in self._known.items() if n in captured.kinds}
            rest = {"known": known, "dims": self._dims, "found": place, "book": self._book}
            made = plan(captured, self.own, self.given, **rest)
            made.patterns.clear()  # a weight that an op cannot take is gathered, at a cost
            return partition(made, chooser=self._chooser)

    def _counted(self, program: Program) -> CountedProgram:
        times = _Times(program)
        work = work_of(program.graph)
        calls = [(c, times.of_call(c.node)) for c in work.calls]
        compute = program.plan.compute
        gathered = frozenset(map(partial(_gathered, program), (c.node for c, _ in calls)))
        return CountedProgram(
            kernel_seconds=sum(
                times.of(k.node) * self._kernel(k)
                for k in work.kernels
                if k.node.meta.get("region") != "update"
            ),
            calls=tuple((replace(c, node=NO_NODE), n) for c, n in calls),
            kept_nbytes=_kept_nbytes(program, times),
            shardings={n: compute[n] for n in self.step.kinds},
            counts=_counts(calls),
            gathered=gathered - {""},
        )


NO_NODE: Any = None  # a node would keep its program


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
