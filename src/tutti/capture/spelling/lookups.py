"""`x[arange(n), index]` looks up along one dim in each of n rows: it becomes a gather, whose rows split.

An index that counts the positions of a dim of the result only pairs the two dims. The remaining indices are
one lookup: `gather`, and for writes `scatter` or `scatter_add`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tutti.graph.analysis.lookup import IndexLookup
from tutti.graph.analysis.order import ancestors
from tutti.graph.edits.edit import Emit, inverse, permuted, shaped, stretched
from tutti.torch_private.op_tables import OpOverload

aten = torch.ops.aten
# The largest index to evaluate, to see whether it counts.
MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Paired:
    """A lookup with some indices that only count.

    `axes` maps each dim of x with such an index to the dim of the indices' common shape along which the
    index counts.
    """

    lookup: IndexLookup
    axes: dict[int, int]

    @staticmethod
    def of(node: fx.Node) -> Paired | None:
        """The paired lookup of a call; None if no index counts, or all do."""
        lookup = IndexLookup.of(node)
        if lookup is None or not lookup.used or 0 in (*lookup.x, *lookup.common):
            return None
        axes: dict[int, int] = {}
        for d in lookup.used:
            axis = _counted(lookup.indices[d], lookup.x[d], lookup.common)
            if axis is not None and axis not in axes.values():
                axes[d] = axis
        return Paired(lookup, axes) if 0 < len(axes) < len(lookup.used) else None

    @property
    def rows(self) -> list[int]:
        """The paired dims of x, in the order of their partners."""
        return sorted(self.axes, key=self.axes.__getitem__)

    @property
    def looked(self) -> list[int]:
        """The dims of x with a lookup."""
        return [d for d in self.lookup.used if d not in self.axes]

    @property
    def extra(self) -> list[int]:
        """The dims of the common shape without a partner in x."""
        return [k for k in range(len(self.lookup.common)) if k not in self.axes.values()]

    @property
    def order(self) -> list[int]:
        """The dims of x in the order of the lookup: rows, dims with a lookup, the others."""
        return [*self.rows, *self.looked, *self.lookup.rest]

    @property
    def found_order(self) -> list[int]:
        """The dims of the result in the same order."""
        first, width = self.lookup.first, len(self.lookup.common)
        common = [*(self.axes[d] for d in self.rows), *self.extra]
        rest = [k if k < first else k + width for k in range(len(self.lookup.rest))]
        return [*(first + k for k in common), *rest]

    def flat(self, places: int) -> list[int]:
        """The shape with the dims of the lookup, or of its result, as one of size `places`."""
        x = self.lookup.x
        return [*(x[d] for d in self.rows), places, *(x[d] for d in self.lookup.rest)]

    @property
    def line(self) -> list[int]:
        """The shape of x for the lookup."""
        return self.flat(self.lookup.size(self.looked))

    @property
    def picked(self) -> list[int]:
        """The shape of the result of the lookup."""
        return self.flat(math.prod(self.lookup.common[k] for k in self.extra))

    def positions(self, emit: Emit) -> fx.Node:
        """The position of the lookup of each element of `picked`."""
        common = [*(self.axes[d] for d in self.rows), *self.extra]
        line = permuted(emit, self.lookup.line(emit, self.looked), common)
        lead = len(self.rows) + 1
        line = shaped(emit, line, [*self.picked[:lead], *[1] * len(self.lookup.rest)])
        return stretched(emit, line, self.picked)


def looked_up(emit: Emit, node: fx.Node) -> fx.Node | None:
    """`index` with paired dims as a gather."""
    paired = Paired.of(node)
    if paired is None:
        return None
    x = shaped(emit, permuted(emit, node.args[0], paired.order), paired.line)
    found = emit(aten.gather.default, x, len(paired.rows), paired.positions(emit))
    order, result = paired.found_order, paired.lookup.result
    found = shaped(emit, found, [result[d] for d in order])
    return permuted(emit, found, inverse(order))


def put(emit: Emit, node: fx.Node) -> fx.Node | None:
    """`index_put` with paired dims as a scatter."""
    paired = Paired.of(node)
    if paired is None:
        return None
    given: Any = node.args
    adding = len(given) > 3 and given[3]
    values = stretched(emit, given[2], paired.lookup.result)
    values = shaped(emit, permuted(emit, values, paired.found_order), paired.picked)
    x = shaped(emit, permuted(emit, given[0], paired.order), paired.line)
    op = aten.scatter_add.default if adding else aten.scatter.src
    new = emit(op, x, len(paired.rows), paired.positions(emit), values)
    new = shaped(emit, new, [paired.lookup.x[d] for d in paired.order])
    return permuted(emit, new, inverse(paired.order))


def _counted(index: Any, size: int, shape: tuple[int, ...]) -> int | None:
    """The dim of `shape` along which an index is 0, 1, ..., size - 1 and the same along all others."""
    val = index.meta["val"]
    first = len(shape) - val.dim()
    along = [k for k in range(val.dim()) if val.shape[k] == size == shape[first + k]]
    known = _known(index) if along else None
    if known is None:
        return None
    for k in along:
        line = torch.arange(size).reshape([size, *[1] * (val.dim() - k - 1)])
        if torch.equal(known, line.expand(known.shape)):
            return first + k
    return None


def _known(node: fx.Node) -> Tensor | None:
    """The value of a node that depends on no input of the step."""
    if any(n.op != "call_function" or not _is_plain(n) for n in ancestors([node])):
        return None

    def made(n: fx.Node) -> Any:
        kwargs = {k: "cpu" if k == "device" else v for k, v in n.kwargs.items()}
        given: Any = map_arg((n.args, kwargs), made)
        return n.target(*given[0], **given[1])  # type: ignore[operator]

    return made(node)


def _is_plain(node: fx.Node) -> bool:
    target, val = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(val, Tensor):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace == "aten" and not random and val.numel() <= MOST_ELEMENTS
