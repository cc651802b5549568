"""The order of sums of several values: results of matmuls first.

    ((r + a) + b) + c    ->    ((a + b) + c) + r        a, b, c: of matmuls with a split contracted dim

Such a result is a sum over ranks that is still to be made. Sums of them wait, too, so all of them take one
all-reduce; a value that is whole on every rank ends the wait. Autograd adds the gradient along a residual
connection first: before the projections of query, key and value, where no norm lies between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import viewed
from tutti.graph.analysis.order import positions_of
from tutti.graph.edits.edit import NOTES
from tutti.propagate.order_of_matmuls import is_matmul

aten = torch.ops.aten


def products_first(graph: fx.Graph) -> None:
    """Reorder the sums of at least three values, some of matmuls and some not."""
    order = positions_of(graph)
    for node in list(graph.nodes):
        if _is_sum(node) and not _is_inner(node):
            summands = list(_summands(node))
            ordered = sorted(summands, key=lambda pair: not _is_product(pair[0]))  # stable
            if len(ordered) > 2 and ordered != summands:
                _write(graph, node, ordered, order)


def _write(
    graph: fx.Graph,
    last: fx.Node,
    ordered: Sequence[tuple[fx.Node, fx.Node]],
    order: Mapping[fx.Node, int],
) -> None:
    """Replace the sum `last` by one in this order; each addition stays where its later operand was added.

    `last` stays the last addition, under its name.
    """
    former = [node for node in _additions(last) if node is not last]
    total, at = ordered[0]
    for x, added in ordered[1:-1]:
        at = max(at, added, key=order.__getitem__)
        with graph.inserting_before(at):
            total = graph.call_function(aten.add.Tensor, (total, x))
        total.meta["val"] = last.meta["val"]
        total.meta |= {key: at.meta[key] for key in NOTES if key in at.meta}
    last.args = (total, ordered[-1][0])
    for node in sorted(former, key=lambda node: -order[node]):
        graph.erase_node(node)


def _additions(node: fx.Node) -> Iterator[fx.Node]:
    """The additions of a sum, the last one first."""
    yield node
    for x in node.all_input_nodes:
        if _is_sum(x) and _is_inner(x):
            yield from _additions(x)


def _summands(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The values of a sum in their order, each with the addition that reads it."""
    for x in node.all_input_nodes:
        if _is_sum(x) and _is_inner(x):
            yield from _summands(x)
        else:
            yield x, node


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors of its own form."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    own: Tensor = node.meta["val"]
    vals = [x.meta.get("val") for x in node.all_input_nodes]
    return all(isinstance(x, Tensor) and (x.shape, x.dtype) == (own.shape, own.dtype) for x in vals)


def _is_inner(node: fx.Node) -> bool:
    """Whether a larger sum of the same region alone reads it."""
    (user, *others) = node.users or (None,)
    if user is None or others or not _is_sum(user):
        return False
    return user.meta.get("region") == node.meta.get("region")


def _is_product(node: fx.Node) -> bool:
    while (source := viewed(node)) is not None:
        node = source
    return is_matmul(node)
