"""Values added at the positions of an index: their sum apart from the tensor to which it is added.

So the positions may be split: each rank sums its own values, and a reduction adds these sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tutti.graph.analysis.lookup import IndexLookup
from tutti.graph.edits.edit import Emit, inverse, permuted, shaped, stretched
from tutti.graph.ops.checked_ids import from_start
from tutti.rules.rule import shape

aten = torch.ops.aten


def index_put(emit: Emit, node: fx.Node) -> fx.Node | None:
    """x with `values` added at `x[indices]`."""
    given: Any = node.args
    x, _, values = given[:3]
    lookup = IndexLookup.of(node)
    adding = len(given) > 3 and given[3]
    if lookup is None or not adding or not _same_floats(x, values):
        return None
    first, end = lookup.first, lookup.first + len(lookup.common)
    order = [*range(first, end), *range(first), *range(end, len(lookup.result))]
    rows = permuted(emit, stretched(emit, values, lookup.result), order)
    index = lookup.line(emit, lookup.used)
    return _added(emit, x, rows, index, [*lookup.used, *lookup.rest], len(lookup.used))


def index_add(emit: Emit, node: fx.Node) -> fx.Node | None:
    """x with the parts of `source` along a dim added at `index` along it."""
    given: Any = node.args
    x, dim, index, source = given[:4]
    if not shape(x) or len(shape(source)) != len(shape(x)) or not _same_floats(x, source):
        return None
    dim %= len(shape(x))
    order = [dim, *(d for d in range(len(shape(x))) if d != dim)]
    alpha = node.kwargs.get("alpha", 1)
    source = source if alpha == 1 else emit(aten.mul.Tensor, source, alpha)
    index = emit(from_start, shaped(emit, index, [-1]), shape(x)[dim], False)
    return _added(emit, x, permuted(emit, source, order), index, order, 1)


def _same_floats(x: Any, values: Any) -> bool:
    return x.meta["val"].is_floating_point() and x.meta["val"].dtype == values.meta["val"].dtype


def _added(
    emit: Emit, x: Any, rows: fx.Node, index: fx.Node, order: list[int], num_looked: int
) -> fx.Node:
    """x plus `rows` at `index`, which indexes the first `num_looked` dims of `order`, flattened."""
    sizes = [shape(x)[d] for d in order]
    places, width = math.prod(sizes[:num_looked]), math.prod(sizes[num_looked:])
    rows = shaped(emit, rows, [*shape(index), width])
    total = emit(aten.embedding_dense_backward.default, rows, index, places, -1, False)
    total = permuted(emit, shaped(emit, total, sizes), inverse(order))
    return emit(aten.add.Tensor, x, total)


DECOMPOSITIONS = {
    aten.index_put.default: index_put,
    aten.index_add.default: index_add,
}
