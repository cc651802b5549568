"""The reductions over ranks of a stage's sums, right after these are complete: its action `A`.

%s = all_reduce(%g, micro)               W of the last micro-batch
%r = reduce_scatter(%s, data)       ->   A        %s -> %r
%w' = adamw(%w, %r)                      after the loop
"""

from __future__ import annotations

from torch import fx

from tutti.graph.analysis.order import sole_readers
from tutti.graph.ops import collectives
from tutti.pipeline.micro_batches.moments import AFTER, Moments
from tutti.pipeline.micro_batches.over_time import sums_over_time


def reductions(moments: Moments) -> dict[fx.Node, list[fx.Node]]:
    """By sum the nodes after it up to the last collective that depends on this sum alone."""
    found = {total: _chain(total, moments) for total in moments.sums if _is_added(total)}
    return {total: chain for total, chain in found.items() if chain}


def _is_added(total: fx.Node) -> bool:
    return total.target is collectives.all_reduce


def _chain(total: fx.Node, moments: Moments) -> list[fx.Node]:
    return sole_readers(
        total,
        ends=lambda n: n.target in collectives.COLLECTIVES,
        inside=lambda n: moments.when[n] == AFTER and not sums_over_time(n),
    )
