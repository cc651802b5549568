"""Recomputation of the forward's values for the backward, right before their first use there.

forward   %3 = mm(%x, %w)        forward   %3 = mm(%x, %w)
          %4 = gelu(%3)                    %4 = gelu(%3)
backward                         backward  %9 = mm(%x, %w)
          gelu_backward(%g, %3)            gelu_backward(%g, %9)
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import RECOMPUTED, erase_dead
from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import MOVES_SLOTS
from tutti.torch_private.pytrees import tree_leaves

# Collectives whose results stay: to move bytes twice costs more than the memory is worth. A gathered value is
# larger than its part, so the backward gathers it again. It also moves slots of experts again: a row goes to
# several experts, so they are several times as large as the layer's input.
_ONCE = (collectives.all_reduce, collectives.reduce_scatter, collectives.all_to_all)


def is_forward(node: fx.Node) -> bool:
    """Whether the forward makes `node`: not an input, not a number."""
    return (
        node.op == "call_function"
        and node.meta.get("region") == "forward"
        and node.target is not collectives.positions
        and any(isinstance(x, Tensor) for x in tree_leaves(node.meta.get("val")))
    )


def is_recomputable(node: fx.Node) -> bool:
    """Whether `node` can be recomputed: the same op on the same values, random ones included."""
    return is_forward(node) and (node.target not in _ONCE or MOVES_SLOTS in node.meta)


def state_only(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on state and constants alone: gathered weights, masks, positions."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta.get("kind") in ("batch", "number"):
            continue
        if node.op != "output" and all(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def computed_once(graph: fx.Graph, *, gathers: bool) -> set[fx.Node]:
    """The values of state and constants alone, which a step in micro-batches computes before them, and keeps.

    With `gathers` those that follow a gather, too: without stages each micro-batch gathers a weight that
    ranks keep in parts.
    """
    lasting, found = state_only(graph), set[fx.Node]()
    for node in graph.nodes:
        in_each = node.target is collectives.all_gather and not gathers
        known = all(x in found or x.op != "call_function" for x in node.all_input_nodes)
        computed = node.op == "call_function" and node in lasting and not is_draw(node)
        if computed and known and not in_each:
            found.add(node)
    return found


def recompute(graph: fx.Graph, kept: Collection[fx.Node]) -> int:
    """Let the backward read only `kept` values of the forward; returns the number of nodes added.

    It reads values that must be kept (results of reductions over ranks) directly. A weight that the backward
    gathers anyway is gathered once, for both.
    """
    recomputer = _Recomputer(graph, kept)
    for user in list(graph.nodes):
        if user.meta.get("region") != "backward" or user.op != "call_function":
            continue
        recomputer.replace_inputs(user)
    erase_dead(graph)
    return recomputer.count


def sources(graph: fx.Graph, kept: Collection[fx.Node]) -> set[fx.Node]:
    """The values of the forward that the backward would read directly if only `kept` were kept."""
    users = (n for n in graph.nodes if n.meta.get("region") == "backward")
    stack = [x for user in users for x in user.all_input_nodes if is_forward(x)]
    lasting, seen, found = state_only(graph), set[fx.Node](), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen or not is_forward(node):
            continue
        seen.add(node)
        if node in kept or not is_recomputable(node):
            found.add(node)
        elif node not in lasting:
            stack += node.all_input_nodes
    return found


def gathered_again(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node of the forward, the bytes of weights that only a recomputation of it would gather again."""
    lasting, twins = state_only(graph), _twins(graph)
    whole = {n for n in lasting if n.target is collectives.all_gather and n not in twins}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node not in lasting and is_forward(node):
            read = [x for x in node.all_input_nodes if x in lasting]
            weights = ancestors(read, lambda x: x in lasting) & whole
            if weights:
                found[node] = sum(map(nbytes_of, weights))
    return found


class _Recomputer:
    def __init__(self, graph: fx.Graph, kept: Collection[fx.Node]) -> None:
        self.graph, self.kept, self.count = graph, kept, 0
        self.new: dict[fx.Node, fx.Node] = {}
        self.twins = _twins(graph)

    def replace_inputs(self, user: fx.Node) -> None:
        """Let a node of the backward read kept values, and recomputed ones before it."""
        for x in user.all_input_nodes:
            new = self._recomputed(x, user)
            if new is not x:
                user.replace_input_with(x, new)

    def _recomputed(self, x: fx.Node, user: fx.Node) -> fx.Node:
        for node in self._missing(x):
            twin = self.twins.get(node)
            if twin is not None:
                self._hoist(twin, user)
            self.new[node] = twin or self._copy(node, user)
        return self.new.get(x, x)

    def _missing(self, x: fx.Node) -> list[fx.Node]:
        """The missing ancestors of `x`, and `x`, in order."""
        found: set[fx.Node] = set()
        stack = [x]
        while stack:
            node = stack.pop()
            if node in found or node in self.new or node in self.kept or not is_recomputable(node):
                continue
            found.add(node)
            if node not in self.twins:
                stack += node.all_input_nodes
        return sorted(found)

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        def source(x: fx.Node) -> fx.Node:
            return self.new.get(x, x)

        args, kwargs = map_arg((node.args, node.kwargs), source)
        with self.graph.inserting_before(before):
            copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.meta = node.meta | {"region": "backward", RECOMPUTED: node.name}
        self.count += 1
        return copy

    def _hoist(self, twin: fx.Node, before: fx.Node) -> None:
        """Move a node of the backward, and its ancestors, before an earlier one."""
        if twin.op != "call_function" or twin < before:
            return
        for x in twin.all_input_nodes:
            self._hoist(x, before)
        before.prepend(twin)
        # At once: a value recomputed for a user between here and its old position would come too late.
        self.replace_inputs(twin)


def _twins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map nodes of the forward to equal ones of the backward: the same collective on the same state."""
    lasting = state_only(graph)
    first: dict[str, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in lasting or node.op != "call_function":
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
        original = same[node] = first.setdefault(f"{node.target} {args} {kwargs}", node)
        if is_forward(original) and node.meta.get("region") == "backward":
            twins.setdefault(original, node)
    return twins
