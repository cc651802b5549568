"""`common`: merges nodes that compute the same value (common subexpressions).

    %6 = eq(%5, %t)                    %6 = eq(%5, %t)
    %7 = where(%6, %a, %b)      ->     %7 = where(%6, %a, %b)
    ...                                ...
    %8 = eq(%5, %t)
    %9 = f(%8)                         %9 = f(%6)

Rules expand an op for the forward and for the backward separately, so both may compute the same index. A
merged value takes memory in between, so the pass merges only small values; views take none. It keeps the
recomputation of `remat`. It runs before any in-place op.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import aliased, is_function
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives

aten = torch.ops.aten
# The program computes a value of more bytes twice.
MOST_NBYTES = 1 << 20
_CALLS = frozenset({operator.getitem, collectives.positions})


def common(graph: fx.Graph) -> int:
    """Rewrite `graph`; returns the number of nodes removed."""
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if not _is_made_once(node):
            continue
        known = first.setdefault(_key(node), node)
        if known is not node and (aliased(node) is not None or _nbytes(node) <= MOST_NBYTES):
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            count += 1
    return count


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
