"""The times of kernels over all graphs of a plan: a kernel of the same shapes takes the same time in each.

The timing of one graph varies by some percent, which is more than many layouts differ by, so the fastest of
them would be the luckiest. The median over the graphs decides between them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from tutti.graph.analysis.draws import is_draw
from tutti.torch_private.pytrees import tree_map


@dataclass(frozen=True)
class GraphTimes:
    """The times of the kernels of a graph, in probes, and the seconds that each probe took meanwhile."""

    relative: Mapping[fx.Node, float]
    probes: Sequence[float]


class KernelTimes:
    """Times by kernel, as found in one graph after the other."""

    def __init__(self) -> None:
        self._found: defaultdict[str, list[float]] = defaultdict(list)
        self._probes: list[float] = []

    def probe_seconds(self) -> float | None:
        """Of the speed probe, the median over all graphs; None before the first."""
        return statistics.median(self._probes) if self._probes else None

    def add(self, times: GraphTimes) -> None:
        """The times of one graph: of each kernel their mean."""
        self._probes += times.probes
        own: defaultdict[str, list[float]] = defaultdict(list)
        for node, x in times.relative.items():
            own[kernel_of(node)].append(x)
        for kernel, found in own.items():
            self._found[kernel].append(statistics.mean(found))

    def seconds(self, times: GraphTimes) -> dict[fx.Node, float]:
        """Those of one graph by its own times, at the machine's median speed."""
        probe = statistics.median(self._probes)
        return {node: probe * x for node, x in times.relative.items()}

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, float] | None:
        """Seconds of each node: the median over the graphs with its kernel; None if no graph has one."""
        probe, medians = statistics.median(self._probes or [0.0]), dict[str, float]()
        made: dict[fx.Node, float] = {}
        for node in nodes:
            kernel = kernel_of(node)
            if kernel not in self._found:
                return None
            if kernel not in medians:
                medians[kernel] = statistics.median(self._found[kernel])
            made[node] = probe * medians[kernel]
        return made


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
