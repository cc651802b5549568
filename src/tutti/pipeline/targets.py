"""The target of a program: runs, predictions and verdicts find the axes in shared memory alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from tutti.environment import SHARED_MEMORY
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import graphs_of
from tutti.graph.ops.matmul import is_faster
from tutti.partition.partition import Program
from tutti.passes.target import Target
from tutti.pipeline.micro_batches.over_time import MICRO

Axes = tuple[str, ...]


def between_ranks(graph: fx.Graph) -> list[Axes]:
    """Every tuple of axes over which a graph and its loops communicate or read coordinates.

    Without the axis of time, which has no ranks.
    """
    played = (n for one in graphs_of(graph) for n in one.nodes if n.target in collectives.PLAYED)
    used = (tuple(a for a in collectives.axes_of(n) if a != MICRO) for n in played)
    return list(dict.fromkeys(filter(None, used)))


def shared_axes(program: Program, is_shared: Callable[[Axes], bool]) -> frozenset[Axes]:
    """The axes of a program, before or after its split in time, whose groups share memory."""
    return frozenset(filter(is_shared, between_ranks(program.graph)))


def target_here(program: Program) -> Target:
    """The target of a run on this host alone, in which steps may overwrite all updated state.

    All ranks share memory, unless the environment turns that off: then collectives overlap, as between hosts.
    """
    shares = SHARED_MEMORY.read() != "off"
    shared = shared_axes(program, lambda _: shares)
    donated = frozenset(program.captured.updated)
    return Target(donated=donated, shared=shared, onednn=is_faster())
