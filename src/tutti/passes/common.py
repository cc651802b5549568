"""`common`: merges nodes that compute the same value (common subexpressions).

    %6 = eq(%5, %t)                    %6 = eq(%5, %t)
    %7 = where(%6, %a, %b)      ->     %7 = where(%6, %a, %b)
    ...                                ...
    %8 = eq(%5, %t)
    %9 = f(%8)                         %9 = f(%6)

Rules expand an op for the forward and for the backward separately, so both may compute the same index. A
merged value takes memory in between, so of large values the pass merges those alone whose first one is still
there: the masks of all layers, which the backward reads. Views take no memory. It keeps the recomputation of
`remat`. It runs before any in-place op. Before a batch is split in time it merges values that depend on
inputs alone (masks, positions), which belong to no stage, and those that all micro-batches share (casts of
weights).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import aliased, is_function
from tutti.graph.analysis.order import positions_of
from tutti.graph.analysis.state import is_state
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives

aten = torch.ops.aten
# The program computes a value of more bytes twice, unless the first one is still there.
MOST_NBYTES = 1 << 20
_CALLS = frozenset({operator.getitem, collectives.positions})


def common_before_split(graph: fx.Graph, once: Collection[fx.Node]) -> int:
    """As `common`, for values that depend on no state, and for those of state that all micro-batches share:
    casts of a weight for the forward and the backward."""
    of_state = set[fx.Node]()
    for node in graph.nodes:
        if is_state(node) or not of_state.isdisjoint(node.all_input_nodes):
            of_state.add(node)
    return common(graph, lambda node: node not in of_state or node in once)


def common(graph: fx.Graph, merges: Callable[[fx.Node], bool] = lambda _: True) -> int:
    """Rewrite `graph`; returns the number of nodes removed. Only nodes for which `merges` holds change."""
    first: dict[Any, fx.Node] = {}
    order = positions_of(graph)
    count = 0
    for node in list(graph.nodes):
        if not _is_made_once(node) or not merges(node):
            continue
        key = _key(node)
        known = first.setdefault(key, node)
        if known is node:
            continue
        if (
            aliased(node) is not None
            or _nbytes(node) <= MOST_NBYTES
            or _last_use(known, order) > order[node]
        ):
            _note_module(known, node)
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            count += 1
        else:
            first[key] = node
    return count


def _note_module(known: fx.Node, node: fx.Node) -> None:
    """Note of a value the innermost module around both."""
    both = ((x.meta.get("module") or "").split(".") for x in (known, node))
    if "module" in known.meta:
        known.meta["module"] = ".".join(a for a, _ in takewhile(_equal, zip(*both, strict=False)))


def _equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _last_use(node: fx.Node, order: Mapping[fx.Node, int]) -> int:
    """The position of the last reader of a value, also through views."""
    ends = (
        max(order[user], _last_use(user, order) if aliased(user) is node else 0)
        for user in node.users
    )
    return max(ends, default=order[node])


def _is_made_once(node: fx.Node) -> bool:
    """Whether another node with the operands of `node` has the same value."""
    if RECOMPUTED in node.meta or node.target is aten.clone.default:
        return False  # two clones must stay two
    return is_function(node) or node.target in _CALLS


def _key(node: fx.Node) -> Any:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return tuple(map(_frozen, x))
    if isinstance(x, dict):
        return tuple((k, _frozen(v)) for k, v in x.items())
    return x if isinstance(x, fx.Node) else (type(x), x)  # 1, 1.0 and True are equal


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    several = value if isinstance(value, list | tuple) else [value]
    return sum(x.nbytes for x in several if isinstance(x, Tensor))
