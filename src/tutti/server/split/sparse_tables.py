"""Sparse tables: the worker's graph takes only the rows that a step reads, in place of the table.

    embedding(table, tokens)                 ->  embedding(rows, places)
    embedding_dense_backward(g, tokens, V)   ->  embedding_dense_backward(g, places, N)

`rows` are N rows of the table, each token's among them, and `places` is the index of each token's row in
them. So a worker pulls only these rows, and pushes only their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.graph.edits.edit import value_of
from tutti.server.split.piece import Cut, GraphPiece

aten = torch.ops.aten
# A table below this size travels whole, as does one of which a batch may read more than half.
LARGE_NBYTES = 2**20
ROWS, PLACES = "rows/", "places/"


@dataclass(frozen=True)
class TableLookup:
    """The only lookup of a table in a step.

    indices: the batch's tensors, by name, to the indices of the rows.
    num_rows: the most different rows.
    padding: the row without a gradient, or -1.
    """

    table: str
    indices: GraphPiece
    num_rows: int
    padding: int

    def unique(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(a batch's rows, ascending; the position of each index among them)."""
        found = self.indices(batch)["indices"]
        rows, places = torch.unique(found, return_inverse=True)
        return rows.cpu(), places

    def room(self, like: Tensor) -> Tensor:
        """A buffer for rows like those of a table."""
        return like.new_zeros((self.num_rows, *like.shape[1:]))

    def pushed(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, gradients of them) to push: without padding, and without zeros."""
        own = gradient[: len(rows)].cpu()
        kept = (rows != self.padding) & own.flatten(1).ne(0).any(1)
        return rows[kept], own[kept]


def lookup_of(captured: Captured, table: str, gradient: fx.Node) -> TableLookup | None:
    """The lookup of `table`, if it is large and its only reader is one embedding of few rows."""
    node = captured.placeholder(table)
    val: Tensor = node.meta["val"]
    users = [u for u in node.users if u.op != "output" and u.meta.get("region") != "update"]
    if val.nbytes < LARGE_NBYTES or val.ndim != 2 or len(users) != 1:
        return None
    (forward,) = users
    if forward.target is not aten.embedding.default or forward.args[0] is not node:
        return None
    if gradient.target is not aten.embedding_dense_backward.default:
        return None
    indices: Any = forward.args[1]
    count = math.prod(indices.meta["val"].shape)
    inputs = {n: name for name, n in captured.placeholders.items()}
    cut = Cut(captured.owner, inputs)
    read = [n for n in cut.ancestors([indices]) if n in inputs]
    from_batch = all(captured.kinds[inputs[n]] == "batch" for n in read)
    if gradient.args[1] is not indices or not from_batch or 2 * count > val.shape[0]:
        return None
    padding: Any = gradient.args[3]
    return TableLookup(table, cut.piece({"indices": indices}), count, int(padding))


def by_rows(captured: Captured, lookup: TableLookup) -> Captured:
    """Let a worker's part take `rows/TABLE` and `places/TABLE`, after its other inputs, for `TABLE`.

    Changes its graph in place.
    """
    graph, table = captured.graph, captured.placeholder(lookup.table)
    (forward,) = table.users
    indices: Any = forward.args[1]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    val, index = table.meta["val"], indices.meta["val"]
    with graph.inserting_before(first), captured.mode:
        rows = graph.placeholder(ROWS.replace("/", "_") + table.name)
        places = graph.placeholder(PLACES.replace("/", "_") + table.name)
        rows.meta["val"] = val.new_empty((lookup.num_rows, *val.shape[1:]))
        places.meta["val"] = index.new_empty(tuple(index.shape), dtype=torch.int64)
    for node, name in ((rows, ROWS), (places, PLACES)):
        node.meta |= {"name": name + lookup.table, "kind": name[:-1]}
    backward = next(
        n
        for n in graph.nodes
        if n.target is aten.embedding_dense_backward.default and n.args[1] is indices
    )
    forward.args = (rows, places)
    backward.args = (backward.args[0], places, lookup.num_rows, -1, *backward.args[4:])
    _again(backward, captured)
    graph.erase_node(table)
    added = {ROWS + lookup.table: "rows", PLACES + lookup.table: "batch"}
    return replace(
        captured,
        inputs=[*(n for n in captured.inputs if n != lookup.table), *added],
        kinds={n: k for n, k in captured.kinds.items() if n != lookup.table} | added,
        state=[s for s in captured.state if s.name != lookup.table],
    )


def _again(changed: fx.Node, captured: Captured) -> None:
    """Recompute the fake values of the users of a node with a new shape."""
    stale = {changed}
    for node in captured.graph.nodes:
        if node in stale and node.op == "call_function":
            with captured.mode, torch.no_grad():
                node.meta["val"] = node.target(*value_of(node.args), **value_of(node.kwargs))
            stale |= set(node.users)
