"""`in_place`: an op whose first operand dies there writes its result over it.

    %5 = mul(%p, 0.99)            ->  %5 = mul_(%p, 0.99)
    %6 = addcdiv(%5, %m, %v)          %6 = addcdiv_(%5, %m, %v)

So state is updated where it lies, and a step needs no second copy of weights and slots.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph import collectives
from tutti.graph.aliases import roots_of
from tutti.graph.liveness import last_uses

aten = torch.ops.aten


def in_place(graph: fx.Graph, donated: Collection[str]) -> int:
    """Rewrite `graph`; `donated` names the inputs whose old value nobody needs. Returns how many.

    A value may be overwritten where it, and every view of it, is used for the last time. Constants and
    inputs that are not donated stay. New state values get memory of their own first, so that the next
    step may overwrite them in turn.
    """
    _own_outputs(graph, roots_of(graph))
    roots = roots_of(graph)
    whole = {x: root for x, root in roots.items() if _fills(x, root)}
    dies = {x: node for node, dead in last_uses(graph).items() for x in dead}
    order = {node: i for i, node in enumerate(graph.nodes)}
    families: dict[fx.Node, list[fx.Node]] = {}
    for node, root in roots.items():
        families.setdefault(root, []).append(node)
    count = 0
    for node in graph.nodes:
        variant = _variant(node.target) if node.op == "call_function" else None
        x = node.args[0] if node.args else None
        if variant is None or not isinstance(x, fx.Node) or x not in whole:
            continue
        root = whole[x]
        family = families[root]
        last = max(order[dies[y]] if y in dies else len(order) for y in family)
        others = [y for y in node.all_input_nodes if y is not x]
        if last > order[node] or any(y in family for y in others):
            continue
        if not _owned(root, donated) or not _same_kind(x, node):
            continue
        node.target = variant
        whole[node] = root
        family += families.pop(node)
        count += 1
    return count


def _own_outputs(graph: fx.Graph, roots: dict[fx.Node, fx.Node]) -> None:
    """Clone a new state value that is a view, or that shares its memory with another output."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    both: Any = output.args[0]
    returned, updates = both
    taken = {roots[x] for x in returned if isinstance(x, fx.Node) and x in roots}
    own: list[fx.Node] = []
    for x in updates:
        elsewhere = x.op in ("placeholder", "get_attr") or roots[x].target is collectives.buffer
        if roots[x] is not x or x in taken or elsewhere:
            notes = dict(x.meta)
            with graph.inserting_before(output):
                x = graph.call_function(aten.clone.default, (x,))
            x.meta = notes
        taken.add(x)
        own.append(x)
    output.args = ((returned, own),)


def _fills(x: fx.Node, root: fx.Node) -> bool:
    """Whether `x` is all of its memory, or a rank's part, which has no two elements at one place."""
    return x is root or x.target is collectives.part


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
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    overload = target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    found = getattr(packet, overload)
    same = len(found._schema.arguments) == len(target._schema.arguments)
    return found if same else None
