"""Boundaries of regions: marks whose two sides can have different shardings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.capture.spelling.rewrites import narrows
from tutti.graph.ops.boundary import boundary

COMPUTE = ("forward", "backward")


@dataclass(frozen=True)
class Boundary:
    """One mark: its direction, its parameter, if any, and the name of the value before it."""

    into: str
    parameter: str = ""
    value: str = ""


def insert_boundaries(captured: Captured) -> dict[fx.Node, Boundary]:
    """Mark every weight that enters the forward or backward and every value that enters the update.

    The forward and the backward get a mark each, so that each may gather a sharded weight and drop it
    afterwards. A weight used in a narrower dtype enters as its cast: ranks cast their shards, and gather
    the narrow ones.
    """
    graph = captured.graph
    weights = _weights(captured)
    weights |= _casts(graph, weights)
    order = {n: i for i, n in enumerate(graph.nodes)}
    found: dict[fx.Node, Boundary] = {}
    for node in list(graph.nodes):
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        if node in weights:
            for region in COMPUTE:
                users = _users(node, region, weights)
                _mark(graph, order, node, users, Boundary(region, weights[node]), found)
        elif node.op == "call_function" and node.meta.get("region") in COMPUTE:
            users = _users(node, "update", found)
            _mark(graph, order, node, users, Boundary("update", value=node.name), found)
    graph.lint()
    return found


def _weights(captured: Captured) -> dict[fx.Node, str]:
    """By node its parameter: the stored value, or the new one if the step goes on with it."""
    parameters = {n for n, kind in captured.kinds.items() if kind == "parameter"}
    new = dict(zip(captured.output[1], captured.updated, strict=True))
    found = {n: name for n, name in new.items() if n.meta.get("region") == "update"}
    found |= {node: name for name, node in captured.placeholders.items()}
    return {n: name for n, name in found.items() if name in parameters}


def _casts(graph: fx.Graph, weights: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """The narrower casts of weights, to put before the boundary, by parameter.

    A region that also uses the weight in its stored dtype (a tied embedding) gathers it once, in that dtype,
    and casts it behind the boundary.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    found: dict[fx.Node, str] = {}
    for weight, name in weights.items():
        casts = [u for u in weight.users if _narrow_cast(u)]
        wide = [r for r in COMPUTE if _users(weight, r, casts)]
        for cast in casts:
            for region in wide:
                _cast_again(graph, order, cast, region)
            if cast.users:
                found[cast] = name
            else:
                graph.erase_node(cast)
    return found


def _narrow_cast(node: fx.Node) -> bool:
    cast = node.target is torch.ops.aten._to_copy.default and node.meta.get("region") in COMPUTE
    return cast and narrows(node.all_input_nodes[0], node)


def _cast_again(graph: fx.Graph, order: dict[fx.Node, int], cast: fx.Node, region: str) -> None:
    """Give the users of `cast` in `region` a cast of their own there."""
    users = _users(cast, region, ())
    if not users:
        return
    with graph.inserting_before(min(users, key=order.__getitem__)):
        own = graph.node_copy(cast)
    own.meta = {**cast.meta, "region": region}
    for user in users:
        user.replace_input_with(cast, own)


def _users(node: fx.Node, region: str, but: Collection[fx.Node]) -> list[fx.Node]:
    """The ops of `region` that use `node`, without those in `but`."""
    users = [u for u in node.users if u.op == "call_function" and u not in but]
    return [u for u in users if u.meta.get("region") == region]


def _mark(
    graph: fx.Graph,
    order: dict[fx.Node, int],
    node: fx.Node,
    users: list[fx.Node],
    kind: Boundary,
    found: dict[fx.Node, Boundary],
) -> None:
    """Put a mark between `node` and `users`."""
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
