"""`shared_state`: keeps sharded state in memory that the ranks of a host share, so gathers copy nothing.

Stored in parts (zero=3), the parts of all ranks are adjacent in one piece of shared memory. A gather waits
until all ranks have written, and is a view of the whole:

    %3 = together(all_gather, [%w], data)      ->   %3 = together_(all_gather, [%w], data)

Stored whole and updated in parts (zero=1, 2), each rank has a copy of its own that the others can read. A
rank updates its part in place and copies the parts of the others:

    %3 = shard(%w, data, 0, 1)                      %3 = part(%w, data, 0, 1)
    %8 = adam(%3, ...)                         ->   %8 = adam_(%3, ...)
    %9 = together(all_gather, [%8], data)           %9 = gather_into([w], [%8], data)

`apart_from_state` clones results in such memory. `wait_for_readers` runs last of all. It puts `meet` before a
write to state that other ranks might still read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tutti.graph.analysis.aliases import aliased, roots_of, written
from tutti.graph.analysis.liveness import memory_ends
from tutti.graph.analysis.order import positions_of
from tutti.graph.analysis.state import is_state
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import graphs_of, loop
from tutti.partition.partition import Program
from tutti.passes.joined import as_together, is_kind, take_out
from tutti.passes.target import Target

Axes = tuple[str, ...]
# Collectives at which no rank goes on before all of the group have arrived.
_MEETINGS = tuple(
    t for t in (*collectives.COLLECTIVES, *collectives.JOINED) if t is not collectives.start
)

_GIVEN_AWAY = (*collectives.COLLECTIVES, collectives.together, collectives.start)


def shared_state(graph: fx.Graph, program: Program, target: Target) -> int:
    """Rewrite gathers of state over axes whose ranks share memory; returns their number."""
    count = 0
    for node in list(graph.nodes):
        if _gathers_nearby(node, target):
            node = as_together(graph, node)
            into = _wholes(graph, node, program, target)
            count += _gather_into(graph, node, into) if into else _view(graph, node)
    return count


def viewed_in_part(graph: fx.Graph, target: Target) -> int:
    """The same for a part of a loop, which only reads state."""
    found = [node for node in graph.nodes if _gathers_nearby(node, target)]
    return sum(_view(graph, as_together(graph, node)) for node in found)


def _gathers_nearby(node: fx.Node, target: Target) -> bool:
    return is_kind(node, "all_gather") and collectives.axes_of(node) in target.shared


def _view(graph: fx.Graph, node: fx.Node) -> int:
    """Turn gathers of state with adjacent parts into views; returns their number."""
    given: Any = node.args
    _, xs, axes, wheres, _ = given
    lying = [i for i, x in enumerate(xs) if _on_cpu(x) and _side_by_side(x, wheres[i])]
    if lying:
        args = ("all_gather", [xs[i] for i in lying], axes, [wheres[i] for i in lying], "")
        take_out(graph, node, lying, collectives.together_, args)
    return len(lying)


def viewed_state(graph: fx.Graph) -> dict[str, tuple[Axes, fx.Node]]:
    """The state whose parts must be adjacent in shared memory: its axes and placeholder by name."""
    found: dict[str, tuple[Axes, fx.Node]] = {}
    for node in (n for one in graphs_of(graph) for n in one.nodes):
        if node.target is collectives.together_ and node.args[0] == "all_gather":
            found |= {x.meta["name"]: (node.args[2], x) for x in node.args[1]}
    return found


def copied_state(graph: fx.Graph) -> dict[str, tuple[Axes, fx.Node]]:
    """The state of which each rank's copy must be in shared memory: its axes and placeholder by name."""
    given = {n.meta.get("name"): n for n in graph.nodes if n.op == "placeholder"}
    found: dict[str, tuple[Axes, fx.Node]] = {}
    for node in graph.nodes:
        if node.target is collectives.gather_into:
            found |= {name: (node.args[2], given[name]) for name in node.args[0]}
    return found


def _on_cpu(x: fx.Node) -> bool:
    return is_state(x) and x.meta["val"].device.type == "cpu"


def _side_by_side(x: fx.Node, where: tuple[int, int]) -> bool:
    """Whether the concatenation of the ranks' parts is the whole."""
    dim, outer = where
    return outer == 1 and math.prod(x.meta["val"].shape[:dim]) == 1


def _wholes(graph: fx.Graph, node: fx.Node, program: Program, target: Target) -> dict[int, fx.Node]:
    """The members of a gather that are new values of state stored whole: member -> the state."""
    order, ends = positions_of(graph), memory_ends(graph)
    given: Any = node.args
    xs, wheres = given[1], given[3]
    output: Any = graph.output_node().args[0]
    new = dict(zip(output[1], program.captured.updated, strict=True))
    state = {n.meta.get("name"): n for n in graph.nodes if n.op == "placeholder"}
    found: dict[int, fx.Node] = {}
    for user in node.users:
        index: Any = user.args[1]
        old = state.get(new.get(user))
        if old is None or not _on_cpu(old) or old.meta["name"] not in target.donated:
            continue
        only_output = all(u.op == "output" for u in user.users) and user not in output[0]
        before = ends[old] < order[node]  # through any view
        same = old.meta["val"].shape == user.meta["val"].shape
        if only_output and before and same and _side_by_side(xs[index], wheres[index]):
            found[index] = old
    return found


def _gather_into(graph: fx.Graph, node: fx.Node, into: dict[int, fx.Node]) -> int:
    given: Any = node.args
    _, xs, axes, wheres, _ = given
    chosen = sorted(into)
    for i in chosen:
        for user in into[i].users:
            if user.target is collectives.shard and user.args[1:] == (axes, *wheres[i]):
                user.target = collectives.part
    names = [into[i].meta["name"] for i in chosen]
    args = (names, [xs[i] for i in chosen], axes, [wheres[i] for i in chosen])
    take_out(graph, node, chosen, collectives.gather_into, args)
    return len(chosen)


def wait_for_readers(graph: fx.Graph) -> int:
    """Put `meet` before writes to state that other ranks might still read; returns their number.

    Ranks are at the same position of the program only at collectives. So between the last read of a gathered
    whole and the next write to any part of it there must be one over its axes. After the last node any rank
    may write, so the end has a `meet` for state that may still have readers.
    """
    axes_of = {
        n: a for found in (viewed_state(graph), copied_state(graph)) for n, (a, _) in found.items()
    }
    if not axes_of:
        return 0
    roots = roots_of(graph)
    wholes: set[fx.Node] = set()
    watched: set[str] = set()  # names of state that other ranks may be reading
    count = 0
    for node in list(graph.nodes):
        if _views(node, wholes):
            wholes.add(node)
        about_to_write = watched if node.op == "output" else _written(node, roots) & watched
        for axes in sorted({axes_of[n] for n in about_to_write}):
            with graph.inserting_before(node):
                graph.call_function(collectives.meet, (axes,)).meta = {"val": None}
            watched -= {n for n in watched if axes_of[n] == axes}
            count += 1
        if node.target in _MEETINGS:
            axes = collectives.axes_of(node)
            watched -= {n for n in watched if axes_of[n] == axes}
        if node.target is loop:
            watched |= set(_viewed_in_loop(node))
        watched |= {roots[x].meta["name"] for x in node.all_input_nodes if x in wholes}
        if node.target is collectives.gather_into:
            watched |= set(node.args[0])  # type: ignore[arg-type]
    return count


def copy_parts_given_away(graph: fx.Graph) -> int:
    """Clone a rank's `part` of its copy if a collective takes it; returns the number of clones.

    A collective needs its operands at the same offset of shared memory on all ranks, or in memory of each
    rank's own; the parts have different offsets.
    """
    parts: set[fx.Node] = set()
    count = 0
    for node in list(graph.nodes):
        if node.target is collectives.part or aliased(node) in parts:
            parts.add(node)
        if node.target not in _GIVEN_AWAY:
            continue
        for x in [x for x in node.all_input_nodes if x in parts]:
            with graph.inserting_before(node):
                clone = graph.call_function(torch.ops.aten.clone.default, (x,))
            clone.meta = dict(x.meta)
            node.replace_input_with(x, clone)
            count += 1
    return count


def apart_from_state(graph: fx.Graph, program: Program) -> int:
    """Clone values of the output that lie in state with a fixed place in shared memory; returns their number.

    The new value of that state comes into this memory, and would overwrite them: a slot with a copy of the
    weight (`slow.copy_(p)`), a result with the weight before its last change.
    """
    fixed = viewed_state(graph).keys() | copied_state(graph).keys()
    if not fixed:
        return 0
    output = graph.output_node()
    both: Any = output.args[0]
    roots, count = roots_of(graph), 0

    def own(x: Any, name: str = "") -> Any:
        nonlocal count
        root = roots.get(x) if isinstance(x, fx.Node) else None
        lies_in = root.meta.get("name") if root is not None and root.op == "placeholder" else None
        if lies_in not in fixed or lies_in == name:
            return x
        count += 1
        with graph.inserting_after(x):
            clone = graph.call_function(torch.ops.aten.clone.default, (x,))
        clone.meta = dict(x.meta)
        return clone

    updates = zip(both[1], program.captured.updated, strict=True)
    output.args = (([own(x) for x in both[0]], [own(x, name) for x, name in updates]),)
    return count


def _viewed_in_loop(node: fx.Node) -> dict[str, tuple[Axes, fx.Node]]:
    body: Any = node.args[0]
    return {k: v for graph in body.graphs() for k, v in viewed_state(graph).items()}


def _views(node: fx.Node, wholes: set[fx.Node]) -> bool:
    """Whether `node` is a gathered whole, or shares its memory."""
    source = aliased(node)
    if source is None:
        return False
    several: Any = node.args[0] if node.args else None
    gathers = isinstance(several, fx.Node) and several.target is collectives.together_
    return source in wholes or (gathers and several.args[0] == "all_gather")


def _written(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> set[str]:
    """The names of the state that `node` writes to."""
    if node.target is collectives.gather_into:
        return set(node.args[0])  # type: ignore[arg-type]
    return {roots[x].meta.get("name", "") for x in written(node) if x in roots}
