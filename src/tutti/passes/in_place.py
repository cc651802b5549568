"""`in_place`: an op overwrites its first operand if that is the operand's last use.

    %5 = mul(%p, 0.99)            ->  %5 = mul_(%p, 0.99)
    %6 = addcdiv(%5, %m, %v)          %6 = addcdiv_(%5, %m, %v)

    %7 = adamw([%p], [%g], [%m], ...)  ->  %7 = adamw_([%p], [%g], [%m], ...)

So a step updates state in place, and needs no second copy of weights and slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import is_pointwise, roots_of
from tutti.graph.analysis.liveness import memory_ends
from tutti.graph.analysis.order import positions_of
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.ops.overloads import counterpart, name_of
from tutti.graph.ops.overwriting import Lists, overwriting_lists

aten = torch.ops.aten


def in_place(graph: fx.Graph, donated: Collection[str]) -> int:
    """Rewrite `graph`; `donated` names the inputs without a later use. Returns the number of ops rewritten.

    An op may overwrite a value at the last use of it and of all its views. Constants and other inputs stay.
    New state values get memory of their own first, so that the next step may overwrite them in turn.
    """
    _own_outputs(graph, roots_of(graph))
    memory = _Memory(graph, donated)
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        lists = overwriting_lists(node.target)
        if lists is not None:
            count += _overwrite_lists(graph, node, memory, lists)
        elif _overwrite(node, memory):
            count += 1
    return count


class _Memory:
    """The sharing of memory among values, and its last uses.

    The result of an op that overwrites a dead value has its memory alone, as if that were fresh.
    """

    def __init__(self, graph: fx.Graph, donated: Collection[str]) -> None:
        self.donated = donated
        self.roots = roots_of(graph)
        self.order, self.ends = positions_of(graph), memory_ends(graph)

    def free(self, x: fx.Node, node: fx.Node) -> bool:
        """Whether `node` may overwrite `x`: it fills its memory, which has no later use."""
        root = self.roots.get(x)
        if root is None or not _fills(x, root) or not _owned(root, self.donated):
            return False
        return self.ends[root] <= self.order[node]


def _overwrite(node: fx.Node, memory: _Memory) -> bool:
    """Let an element-by-element op overwrite its first operand, if allowed."""
    variant = _variant(node.target)
    x = node.args[0] if node.args else None
    if variant is None or not isinstance(x, fx.Node) or not memory.free(x, node):
        return False
    others = [y for y in node.all_input_nodes if y is not x]
    if any(memory.roots.get(y) is memory.roots[x] for y in others) or not _same_kind(x, node):
        return False
    node.target = variant
    return True


def _overwrite_lists(graph: fx.Graph, node: fx.Node, memory: _Memory, lists: Lists) -> int:
    """Let an op over lists overwrite them; if it `clones`, copy operands that must stay first."""
    given: Any = node.args
    operands = [y for a in given for y in (a if isinstance(a, list | tuple) else [a])]
    uses = Counter(memory.roots.get(y) for y in operands if isinstance(y, fx.Node))
    written = [x for k in lists.written for x in given[k]]
    free = [memory.free(x, node) and uses[memory.roots[x]] == 1 for x in written]
    if not all(free) and not lists.clones:
        return 0
    own = iter([x if ok else _cloned(graph, x, node) for x, ok in zip(written, free, strict=True)])
    node.args = tuple(
        [next(own) for _ in xs] if k in lists.written else xs for k, xs in enumerate(given)
    )
    node.target = lists.function
    return sum(free)


def _cloned(graph: fx.Graph, x: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        clone = graph.call_function(aten.clone.default, (x,))
    clone.meta = {**{k: before.meta[k] for k in NOTES if k in before.meta}, "val": x.meta["val"]}
    return clone


def _own_outputs(graph: fx.Graph, roots: dict[fx.Node, fx.Node]) -> None:
    """Clone a new state value that is a view, or that shares its memory with another output."""
    output = graph.output_node()
    both: Any = output.args[0]
    returned, updates = both
    taken = {roots[x] for x in returned if isinstance(x, fx.Node) and x in roots}
    own: list[fx.Node] = []
    for x in updates:
        elsewhere = x.op in ("placeholder", "get_attr")
        if roots[x] is not x or x in taken or elsewhere:
            notes = dict(x.meta)
            with graph.inserting_before(output):
                x = graph.call_function(aten.clone.default, (x,))
            x.meta = notes
        taken.add(x)
        own.append(x)
    output.args = ((returned, own),)


def _fills(x: fx.Node, root: fx.Node) -> bool:
    """Whether the elements of `x` do not overlap: a fresh value, a whole buffer, a rank's part."""
    fills = root.target is collectives.buffer and x.meta["val"].shape == root.meta["val"].shape
    return x is root or fills or x.target is collectives.part


def _owned(x: fx.Node, donated: Collection[str]) -> bool:
    if x.op == "placeholder":
        return x.meta.get("name") in donated
    return x.op == "call_function" and x.target not in (
        collectives.positions,
        collectives.partialize,
    )


def _same_kind(x: fx.Node, node: fx.Node) -> bool:
    a, b = x.meta["val"], node.meta["val"]
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


@cache
def _variant(target: Any) -> Any:
    """The in-place overload of an element-by-element op, if it has one."""
    return counterpart(target, f"{name_of(target)}_") if is_pointwise(target) else None
