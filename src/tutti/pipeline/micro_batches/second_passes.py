"""The refusal of a second forward or backward in a step, which reads the result of an update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from tutti.errors import ShardingError
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.boundary import IDENTITIES
from tutti.graph.text import op_name
from tutti.user_lines import quoted

aten = torch.ops.aten
# They compute nothing: the op behind them is named.
_MOVES = (*IDENTITIES, *collectives.PLAYED, aten.permute.default, aten.reshape.default)
_PASSES = ("forward", "backward")
FIX = "one update a step: two calls of distribute, one for each, share the model"


def reader_of_update(ends: Iterable[fx.Node]) -> fx.Node | None:
    """The first op of a forward or backward, among `ends` and their ancestors, that reads the result of an
    update of the same step; None without one."""
    among, updated = ancestors(ends), set[fx.Node]()
    for node in next((n.graph.nodes for n in among), ()):
        if node not in among or node.op != "call_function":
            continue
        moves = node.target in _MOVES
        reads = not updated.isdisjoint(node.all_input_nodes)
        if reads and not moves and node.meta.get("module"):
            return node  # no op of an optimizer: a forward behind the update, perhaps without gradients
        if node.meta.get("region") == "update" or (reads and moves):
            updated.add(node)
        elif reads and node.meta.get("region") in _PASSES:
            return node
    return None


def reads_new_weights(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node of each micro-batch reads a new value of state: a forward behind the update."""
    while value.target in _MOVES:
        value = value.all_input_nodes[0]
    behind = node.meta.get("region") == value.meta.get("region") == "update"
    return behind and any(user.op == "output" for user in value.users)


def computing_reader(node: fx.Node) -> fx.Node:
    """A node of the user's step: itself, or the first behind marks and collectives, which no user has
    written."""
    found = node
    while found.target in (*IDENTITIES, *collectives.PLAYED):
        reader = next((user for user in found.users if user.op != "output"), None)
        if reader is None:
            return node
        found = reader
    return found


def in_words(node: fx.Node) -> str:
    """The op of a node, and its module."""
    module = node.meta.get("module") or ""
    return f"{op_name(node)} in {module}" if module else op_name(node)


def second_pass(reader: fx.Node, num_micro: int) -> ShardingError:
    """The error for a step whose op `reader` reads the result of an update of the same step."""
    if num_micro == 1:
        what, rest = "pipe= cannot cut the step", ""
        why = "stages go through one forward and one backward, and the update follows them"
    else:
        what = f"micro={num_micro} cannot split the batch in time"
        why = "the update needs the gradients of all micro-batches, so it follows the last of them"
        rest = f"; or leave micro={num_micro} out"
    return ShardingError(
        f"{what}: {in_words(reader)} reads the result of an update",
        at=quoted(source_of(reader)),
        why=why,
        fix=FIX + rest,
    )
