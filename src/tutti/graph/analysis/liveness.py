"""Lifetimes of the values of a graph, and the bytes held at each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import fx

from tutti.graph.analysis.aliases import roots_of
from tutti.graph.analysis.loop_memory import Peak, RowWalk
from tutti.graph.analysis.order import positions_of
from tutti.graph.analysis.part_memory import PartMemory
from tutti.graph.analysis.scratch import borrowed
from tutti.graph.analysis.storage import StorageBlock, Storages
from tutti.graph.ops.loop import Body, LoopPart, loop
from tutti.torch_private.fake_tensors import FakeTensorMode


def last_uses(
    graph: fx.Graph, same: Mapping[fx.Node, fx.Node] = MappingProxyType({})
) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it uses last, itself if unused; values of the output live on.

    `same` maps nodes without effect to the values that they return: a use of one is a use of its value.
    """
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node in same:
            continue
        for x in (*(same.get(x, x) for x in node.all_input_nodes), node):
            if x not in seen and node.op != "output":
                last.setdefault(node, []).append(x)
            seen.add(x)
    return last


def memory_ends(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each root (`aliases.roots_of`) the position of the last node that uses its memory, through any
    view; behind all nodes for values of the output."""
    order = positions_of(graph)
    dies = {x: order[node] for node, dead in last_uses(graph).items() for x in dead}
    ends: dict[fx.Node, int] = {}
    for x, root in roots_of(graph).items():
        ends[root] = max(ends.get(root, 0), dies.get(x, len(order)))
    return ends


def last_holders(graph: fx.Graph, storages: Storages) -> dict[fx.Node, list[StorageBlock]]:
    """For each node the blocks freed after it: those that no later node uses.

    Blocks of inputs, of constants and of the output are never freed.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    end: dict[StorageBlock, int] = {}
    for node, dead in last_uses(graph).items():
        for x in dead:
            for block in storages.of.get(x, ()):
                end[block] = max(end.get(block, 0), order[node])
    output = graph.output_node()
    kept = {block for x in output.all_input_nodes for block in storages.of[x]}
    nodes = list(graph.nodes)
    freed: dict[fx.Node, list[StorageBlock]] = {}
    for block, i in end.items():
        if block not in kept and not storages.is_given(block):
            freed.setdefault(nodes[i], []).append(block)
    return freed


def held(graph: fx.Graph, storages: Storages) -> Iterator[tuple[fx.Node, int]]:
    """Each node with the bytes held while it runs: live values, its results and its scratch memory.

    Inputs and constants do not count: the caller holds them. A loop counts with the peak of its row, its
    sums included.
    """
    freed = last_holders(graph, storages)
    live = 0
    for node in graph.nodes:
        inside = peak_inside(node, storages.mode)
        if inside is not None:
            yield node, live + inside.nbytes
        live += sum(block.nbytes for block in storages.made(node))
        if inside is None:
            yield node, live + borrowed(node, storages)
        live -= sum(block.nbytes for block in freed.get(node, ()))


def peak_inside(node: fx.Node, mode: FakeTensorMode) -> Peak | None:
    """The peak of a loop, beyond the bytes held before it; None for any other node."""
    walk = row_walk(node, mode)
    return None if walk is None else walk.peak()


def row_walk(node: fx.Node, mode: FakeTensorMode) -> RowWalk | None:
    """The walk over the row of a loop, not begun; None for any other node."""
    if node.target is not loop:
        return None
    body: Body = node.args[0]  # type: ignore[assignment]

    def memory_of(part: LoopPart, adding: bool) -> PartMemory:
        return PartMemory(part, mode, borrowed, last_holders, adding=adding)

    return RowWalk(body, memory_of)


def peak(graph: fx.Graph, storages: Storages) -> tuple[fx.Node, int]:
    """The node with the most bytes held, and their number, as `held` counts."""
    return max(held(graph, storages), key=lambda entry: entry[1])


def peak_with_given(graph: fx.Graph, mode: FakeTensorMode) -> int:
    """The bytes held at the peak of `graph`, inputs and constants included."""
    storages = Storages(graph, mode)
    return peak(graph, storages)[1] + sum(block.nbytes for block in storages.given())
