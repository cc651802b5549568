"""`remat`: recomputes activations in the backward instead of keeping them from the forward.

It orders the droppable values by bytes saved per unit of work; `full` drops all of them, a budget as few from
the front as it needs. It never drops values that `passes.remat_segments` keeps between segments, so that the
backward recomputes one segment at a time. It drops the last segment, which the backward reads first, only for
a budget that needs it. The numbers stay the same to the bit: the same ops run on the same values, and random
numbers are a function of seed, step and position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import fx
from torch.fx.node import map_arg

from tutti.errors import LayoutError
from tutti.graph.analysis.cost import flops_of_call
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.storage import StorageBlock, Storages
from tutti.graph.ops.expert_rows import MOVES_SLOTS
from tutti.layout.budget import Budget, nbytes_text
from tutti.passes.recompute import (
    gathered_again,
    is_forward,
    is_recomputable,
    recompute,
    sources,
)
from tutti.passes.remat_segments import kept_blocks
from tutti.torch_private.fake_tensors import FakeTensorMode

# Work per element of an op's result, in floating-point operations: most ops wait for memory, and random bits
# need a hash. And per byte that moves between ranks.
_ELEMENT, _RANDOM, _MOVED = 32, 256, 4096
# The number of plans to search for a budget in bytes.
_NUM_PLANS = 32


def remat(
    graph: fx.Graph,
    mode: FakeTensorMode,
    budget: Budget,
    peak: Callable[[fx.Graph], int],
    once: Collection[fx.Node] = (),
) -> int:
    """Rewrite `graph` so that it fits `budget`; returns the number of nodes added.

    `peak` predicts a rank's peak of bytes in a run of a graph. `once`: values that all micro-batches share,
    so there is nothing to save. Raises `LayoutError`, with the least possible budget, if `budget` is too
    small even for full recomputation.
    """
    backward = any(n.meta.get("region") == "backward" for n in graph.nodes)
    if not backward:
        return 0
    plans = _Plans(graph, mode, once)
    return recompute(graph, plans.kept(plans.fewest(budget, peak)))


class _Plans:
    """Plan k drops the first k of `order` from the values that the backward reads."""

    def __init__(
        self, graph: fx.Graph, mode: FakeTensorMode, once: Collection[fx.Node] = ()
    ) -> None:
        self.graph, self.storages = graph, Storages(graph, mode)
        self.values: dict[StorageBlock, list[fx.Node]] = {}
        for node, blocks in self.storages.of.items():
            for block in blocks:
                self.values.setdefault(block, []).append(node)
        self.read = {b for b in self.values if is_forward(b.node) and self._is_read(b)}
        self.lasting, last = kept_blocks(graph, self.storages)
        again = gathered_again(graph)
        self.lasting |= {b for b in self.values if again.get(b.node, 0) > b.nbytes}
        self.shared = {b for b in self.values if b.node in once}
        self.lasting |= self.shared
        last -= self.lasting
        self.everything = self.read | self.lasting | last
        self.order = self._by_worth(self.read - self.lasting - last)
        self.num_before_last = len(self.order)
        self.order += self._by_worth(last)

    def _by_worth(self, blocks: set[StorageBlock]) -> list[StorageBlock]:
        """The recomputable blocks, by bytes saved per unit of work."""
        droppable = [b for b in blocks if is_recomputable(b.node)]
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        work = {b: self._work(b) for b in droppable}
        return sorted(droppable, key=lambda b: (-b.nbytes / max(work[b], 1.0), position[b.node]))

    def _is_read(self, block: StorageBlock) -> bool:
        return any(_read_by_backward(x) for x in self.values[block])

    def kept(self, num_dropped: int) -> set[fx.Node]:
        """The values of the forward that the backward reads directly."""
        blocks = (self.everything - set(self.order[:num_dropped])) | set(self.storages.given())
        return {n for n, found in self.storages.of.items() if found and blocks.issuperset(found)}

    def _work(self, block: StorageBlock) -> float:
        """Work to recompute a block from the other kept values, in floating-point operations."""
        seen: set[fx.Node] = set()
        stack, work = [block.node], 0.0
        while stack:
            node = stack.pop()
            known = node is not block.node and self.everything.issuperset(self.storages.of[node])
            if node in seen or not is_recomputable(node) or known:
                continue
            seen.add(node)
            work += self._work_of(node)
            stack += node.all_input_nodes
        return work

    def _work_of(self, node: fx.Node) -> float:
        made = sum(b.nbytes for b in self.storages.made(node))
        if is_draw(node):
            return float(_RANDOM * made)
        if MOVES_SLOTS in node.meta:
            return float(_MOVED * made)
        fakes = self.storages.fakes
        args, kwargs = map_arg((node.args, node.kwargs), fakes.__getitem__)
        flops = flops_of_call(node.target, args, kwargs, fakes[node])
        return float(_ELEMENT * made / 4) if flops is None else flops

    def fewest(self, budget: Budget, peak: Callable[[fx.Graph], int]) -> int:
        """The least number of dropped blocks that meets the budget.

        A prediction of a peak takes a copy of the graph and a fake run, so a budget in bytes tries only a
        few plans.
        """
        every = len(self.order)
        if budget.share is not None:
            whole = max(1, self._left(0))
            return _first(range(every + 1), lambda k: self._left(k) / whole, budget, budget.share)
        if budget.nbytes is not None:
            plans = sorted({every * k // _NUM_PLANS for k in range(_NUM_PLANS + 1)})
            return _first(plans, lambda k: peak(self._with(k)), budget, budget.nbytes)
        return self.num_before_last

    def _with(self, num_dropped: int) -> fx.Graph:
        """A copy of the graph under a plan."""
        copy, mapped = fx.Graph(), {}
        copy.output(copy.graph_copy(self.graph, mapped))
        recompute(copy, {mapped[n] for n in self.kept(num_dropped)})
        return copy

    def _left(self, num_dropped: int) -> int:
        """Bytes that the forward of a micro-batch leaves for the backward under a plan; views of state count
        none."""
        left = sources(self.graph, self.kept(num_dropped))
        blocks = {b for x in left for b in self.storages.of[x]}
        return sum(b.nbytes for b in blocks - self.shared if not self.storages.is_given(b))


def _first(plans: Sequence[int], size: Callable[[int], float], budget: Budget, limit: float) -> int:
    """Bisection: the peak nearly always falls with the number of dropped blocks.

    If the last plan does not suffice, an earlier one may.
    """
    if size(plans[0]) <= limit:
        return plans[0]
    if size(plans[-1]) > limit:
        some = plans[:: max(1, len(plans) // _NUM_PLANS)]
        least, plan = min((size(k), k) for k in some)
        if least > limit:
            raise _too_small(budget, least)
        return plan
    low, high = 0, len(plans) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if size(plans[middle]) <= limit else (middle, high)
    return plans[high]


def _read_by_backward(node: fx.Node) -> bool:
    return any(u.meta.get("region") == "backward" for u in node.users)


def _too_small(budget: Budget, least: float) -> LayoutError:
    if budget.share is not None:
        share = math.ceil(1000 * least) / 1000
        return LayoutError(
            f"remat={budget} cannot be kept: at least {share:g} of the activations must stay",
            why="the inputs of each segment are what the rest is recomputed from",
            fix=f"remat={share:g} or more, or remat=full",
        )
    return LayoutError(
        f"remat={budget} cannot be kept: a rank holds at least {nbytes_text(least)} at the peak",
        why="state, gradients and the inputs of each segment stay whatever is recomputed",
        fix=f"remat={nbytes_text(least)} or more, more ranks, or zero=3",
    )
