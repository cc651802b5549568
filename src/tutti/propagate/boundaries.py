"""Where regions meet: marks that let a value lie differently on each side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from tutti.capture.step import Captured
from tutti.graph.boundary import boundary

COMPUTE = ("forward", "backward")


@dataclass(frozen=True)
class Boundary:
    """One mark: which way it leads, and the parameter behind it, if any."""

    into: str
    parameter: str = ""


def insert_boundaries(captured: Captured) -> dict[fx.Node, Boundary]:
    """Mark every weight that enters the forward or backward and every value that enters the update.

    The forward and the backward get a mark each, so that a weight stored in parts may be gathered for
    each of them and dropped in between.
    """
    names = {node: name for name, node in captured.placeholders.items()}
    parameters = {n for n, kind in captured.kinds.items() if kind == "parameter"}
    new_values = dict(zip(captured.output[1], captured.updated, strict=True))
    order = {n: i for i, n in enumerate(captured.graph.nodes)}
    found: dict[fx.Node, Boundary] = {}
    for node in list(captured.graph.nodes):
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        name = names.get(node) or new_values.get(node, "")
        from_state = name in parameters and (
            node.op == "placeholder" or node.meta.get("region") == "update"
        )
        if from_state:
            for region in COMPUTE:
                _mark(captured.graph, order, node, Boundary(region, name), found)
        elif node.op == "call_function" and node.meta.get("region") in COMPUTE:
            _mark(captured.graph, order, node, Boundary("update"), found)
    captured.graph.lint()
    return found


def _mark(
    graph: fx.Graph,
    order: dict[fx.Node, int],
    node: fx.Node,
    kind: Boundary,
    found: dict[fx.Node, Boundary],
) -> None:
    users = [
        u
        for u in node.users
        if u.op == "call_function" and u.meta.get("region") == kind.into and u not in found
    ]
    if not users:
        return
    first = min(users, key=order.__getitem__)
    with graph.inserting_before(first):
        mark = graph.call_function(boundary, (node,))
    mark.meta = {k: v for k, v in first.meta.items() if k in ("source", "module")}
    mark.meta |= {"val": node.meta["val"], "region": kind.into}
    for user in users:
        user.replace_input_with(node, mark)
    found[mark] = kind
