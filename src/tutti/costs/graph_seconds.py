"""The time of a graph: its kernels and its collectives.

    seconds of a graph = sum over its kernels (kernel_seconds)
                       + sum over its collectives (host + collective_seconds)

An eager runtime launches a collective from the host, after the kernel before and ahead of the next.

`work_of` reads a graph once; its work is then costed on any device and topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tutti.costs.collective_seconds import RankGroup, collective_seconds
from tutti.costs.kernel_seconds import kernel_seconds
from tutti.costs.kernels import DeviceKernel, kernels_of
from tutti.graph.ops import collectives
from tutti.hardware.accelerator import Device
from tutti.hardware.topology import Topology
from tutti.torch_private.pytrees import tree_leaves


@dataclass(frozen=True)
class CollectiveCall:
    """A collective of a graph: its kind, the bytes of the whole value, its axes, the dtypes of its values.

    reduction: `sum`, `max`, ... if it reduces.
    """

    node: fx.Node
    kind: str
    nbytes: int
    axes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    reduction: str = ""


@dataclass(frozen=True)
class GraphWork:
    """What a device does for a graph."""

    kernels: tuple[DeviceKernel, ...]
    calls: tuple[CollectiveCall, ...]

    def where(self, wanted: Callable[[fx.Node], bool]) -> GraphWork:
        """The part of it whose nodes are wanted."""
        return GraphWork(
            tuple(k for k in self.kernels if wanted(k.node)),
            tuple(t for t in self.calls if wanted(t.node)),
        )


def work_of(graph: fx.Graph, *, fused: bool | Callable[[fx.Node], bool] = True) -> GraphWork:
    """The kernels and collectives of a partitioned graph; `fused` as in `kernels_of`."""
    calls = tuple(made for node in graph.nodes if (made := collective_call(node)))
    return GraphWork(tuple(kernels_of(graph, fused=fused)), calls)


def work_seconds(
    work: GraphWork,
    device: Device,
    topology: Topology,
    groups: Mapping[tuple[str, ...], RankGroup],
    *,
    eager: bool = True,
) -> float:
    """Seconds of all work, one after the other.

    Args:
        work: of a graph or of a part of it.
        device: computes it.
        topology: links its ranks.
        groups: the ranks of each collective's axes.
        eager: as in `kernel_seconds`.

    Raises:
        PlanError: a dtype without a peak, a collective without a cost.
    """
    computing = sum(kernel_seconds(k, device, eager=eager) for k in work.kernels)
    host = device.host_seconds.value if eager else 0.0
    return computing + sum(
        host + collective_seconds(c.kind, c.nbytes, groups[c.axes], topology)
        for c in work.calls
        if groups[c.axes].size > 1
    )


def collective_call(node: fx.Node) -> CollectiveCall | None:
    """The collective that a node begins or carries out; None for other nodes, and for the end of one."""
    if node.target not in (*collectives.COLLECTIVES, *collectives.JOINED):
        return None
    kind, axes, values = (
        getattr(node.target, "__name__", ""),
        collectives.axes_of(node),
        node.args[:1],
    )
    if node.target in _SEVERAL:
        kind, values = node.args[0], node.args[1]
    elif node.target is collectives.gather_into:
        kind, values = "all_gather", node.args[1]
    elif node.target is collectives.meet:
        return CollectiveCall(node, "all_reduce", 0, axes)
    kind = "reduce_scatter" if kind == "reduce_part" else str(kind)
    whole: Iterable[Any] = _results(node) if kind == "all_gather" else values  # type: ignore[arg-type]
    tensors = [x for v in whole for x in tree_leaves(v.meta.get("val")) if isinstance(x, Tensor)]
    nbytes = sum(x.nbytes for x in tensors)
    dtypes = tuple(dict.fromkeys(x.dtype for x in tensors))
    return CollectiveCall(node, kind, nbytes, tuple(axes), dtypes, _reduction(node))


_SEVERAL = (collectives.together, collectives.together_, collectives.start)
_REDUCTION_AT: dict[Any, int] = {
    collectives.all_reduce: 2,
    collectives.reduce_scatter: 4,
    **dict.fromkeys(_SEVERAL, 4),
}


def _reduction(node: fx.Node) -> str:
    place = _REDUCTION_AT.get(node.target)
    return "" if place is None else str(node.args[place] or "")


def _results(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes with the gathered values: those of a start are at its end."""
    if node.target is collectives.start:
        return [user for user in node.users if user.target is collectives.finish]
    return [node]
