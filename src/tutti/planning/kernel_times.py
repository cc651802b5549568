"""The times of kernels over all graphs of a plan: a kernel of the same shapes takes the same time in each.

The timing of one graph varies by some percent, which is more than many layouts differ by, so the fastest of
them would be the luckiest. The median over the graphs decides between them. Layouts have most kernels in
common: a graph of kernels that several others have need not be timed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from tutti.graph.analysis.draws import is_draw
from tutti.planning.processor_speed import ProcessorSpeed
from tutti.torch_private.pytrees import tree_map

# Graphs after whose timings a kernel is known, and the share of a graph that may be of other kernels.
_ENOUGH, _SMALL_SHARE = 3, 0.05


@dataclass(frozen=True)
class GraphTimes:
    """The times of the kernels of a graph, in probes, and the seconds of each probe meanwhile; of one `alone`
    before."""

    relative: Mapping[fx.Node, float]
    probes: Sequence[float]
    alone: float


class KernelTimes:
    """Times by kernel, as found in one graph after the other.

    Args:
        num_processes: that run a graph at the same time.
        speed: of the processor, for all kernels of a plan.
    """

    def __init__(self, num_processes: int = 1, speed: ProcessorSpeed | None = None) -> None:
        self._found: defaultdict[str, list[float]] = defaultdict(list)
        self._num_processes, self._speed = num_processes, speed or ProcessorSpeed()

    def factor(self) -> float:
        """How many times as long as their seconds these kernels take at the speed of the whole plan."""
        return self._speed.factor(self._num_processes)

    def add(self, times: GraphTimes) -> None:
        """The times of one graph: of each kernel their mean."""
        self._speed.add(self._num_processes, times.alone, times.probes)
        own: defaultdict[str, list[float]] = defaultdict(list)
        for node, x in times.relative.items():
            own[kernel_of(node)].append(x)
        for kernel, found in own.items():
            self._found[kernel].append(statistics.mean(found))

    def seconds(self, times: GraphTimes) -> dict[fx.Node, float]:
        """Those of one graph by its own times, at the speed of all estimates."""
        probe = self._speed.probe_seconds
        return {node: probe * x for node, x in times.relative.items()}

    def known(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, float] | None:
        """Seconds of each node, as `of`; None if the graph is to be timed: too few graphs had its kernels."""
        kernels = {node: kernel_of(node) for node in nodes}
        if (found := self._medians(kernels)) is None:
            return None
        new = sum(found[n] for n, kernel in kernels.items() if len(self._found[kernel]) < _ENOUGH)
        return found if new <= _SMALL_SHARE * sum(found.values()) else None

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, float] | None:
        """Seconds of each node: the median over the graphs with its kernel; None if no graph has one."""
        return self._medians({node: kernel_of(node) for node in nodes})

    def _medians(self, kernels: Mapping[fx.Node, str]) -> dict[fx.Node, float] | None:
        every = set(kernels.values())
        if not every <= self._found.keys():
            return None
        probe = self._speed.probe_seconds
        medians = {kernel: probe * statistics.median(self._found[kernel]) for kernel in every}
        return {node: medians[kernel] for node, kernel in kernels.items()}


def kernel_of(node: fx.Node) -> str:
    """An op with the shapes, strides and dtypes of its operands, and its numbers."""
    if is_draw(node):
        kind, _, params, dtype = node.args[:4]
        return str((kind, params, dtype, _operand(node)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), _operand)
    return str((node.target, args, kwargs))


def _operand(node: fx.Node) -> Any:
    return str(tree_map(_shape, node.meta.get("val")))


def _shape(x: Any) -> Any:
    return str((tuple(x.shape), x.stride(), x.dtype)) if isinstance(x, Tensor) else str(x)
