"""Values of samples that the update adds up: the gradients of samples, which a private step clips.

Propagation does not pass the mark before the update: its values are mostly gradients, sums over the samples.
A value of each sample would be gathered there. It stays split where the update adds the samples up before it
computes new state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from tutti.capture.captured import Captured
from tutti.graph.ops.boundary import boundary
from tutti.layout import Mesh, Sharding
from tutti.propagate.boundaries import Boundary
from tutti.propagate.factors import axes_of
from tutti.propagate.spread import Spread, tensors_of
from tutti.rules import is_tensor_call


def keep_samples_split(
    spread: Spread,
    captured: Captured,
    boundaries: Mapping[fx.Node, Boundary],
    axes: Collection[str],
    mesh: Mesh,
) -> bool:
    """Seed the marks of such values with the `axes` that split their samples; whether there are any."""
    new_state, found = {*captured.output[1]}, False
    for mark in [n for n in captured.graph.nodes if n in boundaries]:
        into, value = boundaries[mark].into, mark.all_input_nodes[0]
        have = spread.of(value) if into == "update" else None
        if have is None or not have.axes & {*axes}:
            continue
        split = have.only(frozenset(axes), mesh)
        if not _reaches(mark, split, spread, new_state):
            spread.seed(mark, split, "samples that the update adds up")
            found = True
    return found


def _reaches(
    mark: fx.Node, split: Sharding, spread: Spread, new_state: Collection[fx.Node]
) -> bool:
    """Whether a split dim of a mark is one of new state, too."""
    dims = {mark: {d for d, dim in enumerate(split.dims) if axes_of(dim)}}
    todo = [mark]
    while todo:
        node = todo.pop()
        if node in new_state:
            return True
        for user in node.users:
            todo += _carried(user, dims, spread)
    return False


def _carried(node: fx.Node, dims: dict[fx.Node, set[int]], spread: Spread) -> list[fx.Node]:
    """Add the dims of an op's results along which samples run; the results with new ones."""
    if not is_tensor_call(node) or node.target is boundary:
        return []
    rule = spread.rule(node)
    if rule is None:  # its operands are whole
        return []
    pairs = tensors_of(node, rule)
    given = pairs[: len(rule.operands)]
    factors = {f for term, x in given for d in dims.get(x, ()) for f in term[d]}
    changed = []
    for term, x in pairs[len(rule.operands) :]:
        more = {d for d, dim in enumerate(term) if factors.intersection(dim)}
        if more - dims.get(x, set()):
            dims[x] = dims.get(x, set()) | more
            changed.append(x)
    return changed
