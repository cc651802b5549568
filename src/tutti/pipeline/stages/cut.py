"""Cuts the nodes that run once a micro-batch into stages, by their order and cost.

The forward is a list of nodes, cut at a few positions, regardless of module trees. `backward.py` assigns the
nodes of the backward.

Values that depend on inputs alone (masks, positions, dropout) belong to no stage: each stage computes them
itself. The choice of cuts minimizes the seconds of a micro-batch (`balance.py`), by the prices of
`costs/step_prices.py`.
"""

from __future__ import annotations

import difflib
import math
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations, pairwise

import torch
from torch import fx

from tutti.costs.step_prices import StepPrices
from tutti.errors import LayoutError
from tutti.graph.analysis.cost import nbytes_of
from tutti.layout import Mesh
from tutti.pipeline.micro_batches.moments import Moments, is_linear
from tutti.pipeline.stages.backward import Backward, backward_of
from tutti.pipeline.stages.balance import balanced, division_cost
from tutti.pipeline.stages.recomputed import read_what_is_there
from tutti.pipeline.stages.too_few_ops import too_few_ops

# The cost of a node's forward and backward, relative to its forward.
FORWARD_AND_BACKWARD = 3.0
# Candidate positions of cuts, per stage.
CANDIDATES = 24
# The most assignments of nodes to try for an exhaustive search of a small graph.
TRIED_NODES = 200_000


@dataclass
class Stages:
    """The stage of each node that runs once a micro-batch and belongs to one.

    `forward` are the nodes of the forward, `free` those without a stage. `prices` are seconds of nodes.
    """

    num_stages: int
    stage: dict[fx.Node, int] = field(default_factory=dict)
    forward: set[fx.Node] = field(default_factory=set)
    free: set[fx.Node] = field(default_factory=set)
    prices: Mapping[fx.Node, float] = field(default_factory=dict)

    def seconds(self) -> list[float]:
        """The predicted time of each stage for one micro-batch, forward and backward."""
        total = [0.0] * self.num_stages
        for node, stage in self.stage.items():
            total[stage] += self.prices.get(node, 0.0)
        return total


def cut(
    moments: Moments,
    num_stages: int,
    *,
    names: Sequence[str] = (),
    homes: Mapping[str, frozenset[int]] | None = None,
    mesh: Mesh | None = None,
) -> Stages:
    """Cut into `num_stages` stages.

    Args:
        moments: the nodes that run once a micro-batch.
        names: patterns of module names at which each stage but the first begins. Chosen by cost if empty.
        homes: by name of a state tensor, the stages at the pipeline rank that keeps it, if an earlier
            program has assigned it.
        mesh: the ranks of collectives and messages.

    Raises:
        LayoutError: fewer nodes than stages, or a name that no module has.
    """
    cutter = _StageCutter(moments, num_stages, mesh)
    if names:
        cuts = cutter.named(names)
    else:
        cuts = cutter.at_homes(homes) if homes else cutter.balanced()
    found = cutter.stages(cuts)
    read_what_is_there(moments, found.stage)
    return found


class _StageCutter:
    def __init__(self, moments: Moments, num_stages: int, mesh: Mesh | None = None) -> None:
        self.moments, self.num_stages = moments, num_stages
        during = moments.during()
        self.free = {n for n in during if n not in moments.stateful}
        backward = backward_of(during, self.free)
        own = [n for n in during if n not in self.free]
        self.forward = [n for n in own if n not in backward]
        rest = [n for n in own if n in backward]
        self.backward = Backward(moments, self.forward, rest, self.free)
        inside = {n: set(self.forward) for n in self.forward}
        inside |= dict.fromkeys(rest, set(rest) - _added_apart(moments))
        readers = {n: among.intersection(n.users) for n, among in inside.items()}
        self.readers = {n: used for n, used in readers.items() if used}
        self.position = {n: i for i, n in enumerate(self.forward)}
        self.prices = StepPrices.of([n.meta.get("val") for n in own], mesh or Mesh())
        priced = self.prices.seconds(moments.graph)
        self.seconds = {n: priced.get(n, 0.0) for n in own}
        # An op and the parts of its tuple stay together: messages are tensors.
        self.parts = [
            (n, n.args[0])
            for n in own
            if n.target is operator.getitem and n.args[0] in self.seconds
        ]
        costly = sum(1 for n in self.forward if self.seconds[n] > 0)
        if 1 < num_stages > costly:
            raise too_few_ops(moments, num_stages, costly)

    def stages(self, cuts: Sequence[int]) -> Stages:
        """Every node's stage if stage k + 1 begins at forward node `cuts[k]`."""
        found = Stages(len(cuts) + 1, forward=set(self.forward), free=set(self.free))
        found.prices = self.seconds
        bounds = [0, *cuts, len(self.forward)]
        for stage, (low, high) in enumerate(pairwise(bounds)):
            found.stage |= dict.fromkeys(self.forward[low:high], stage)
        self.backward.assign(found.stage)
        for part, whole in self.parts:
            found.stage[part] = found.stage[whole]
        return found

    def named(self, names: Sequence[str]) -> list[int]:
        """The positions at which modules of these names begin."""
        if len(names) != self.num_stages - 1:
            raise LayoutError(
                f"cut= has {len(names)} names for {self.num_stages} stages",
                fix=f"name where each stage but the first begins: {self.num_stages - 1} names",
            )
        found = []
        for name in names:
            at = [i for i, n in enumerate(self.forward) if _belongs(n, name)]
            if not at:
                modules = {n.meta.get("module") or "": None for n in self.forward}
                near = difflib.get_close_matches(name, modules, n=3) or list(filter(None, modules))
                raise LayoutError(
                    f'cut="{name}" names no module of the forward',
                    fix="such as " + ", ".join(near[:6]),
                )
            found.append(at[0])
        if found != sorted(set(found)) or not found[0]:
            begins = [f'"{name}" begins at {i}' for name, i in zip(names, found, strict=True)]
            later = {n.meta.get("module") or "": None for n in self.forward[1:]}
            free = [m for m in later if m and not _belongs(self.forward[0], m)]
            raise LayoutError(
                "cut= must name modules in the order in which the forward comes to them",
                why=f"of the nodes 0 to {len(self.forward) - 1} "
                + ", ".join(begins)
                + ("; the first stage begins at 0" if not found[0] else ""),
                fix="in this order, such as " + ", ".join(free[:6]) if free else "leave cut out",
            )
        return found

    def at_homes(self, homes: Mapping[str, frozenset[int]]) -> list[int]:
        """Cut at the first read of the next stage's state.

        The first stage that reads state keeps it, so later reads do not count.
        """
        first = [len(self.forward)] * self.num_stages
        reached, seen = 0, set[str]()
        for i, node in enumerate(self.forward):
            read = {
                s.meta["name"] for x in node.all_input_nodes for s in self.backward.state_behind(x)
            }
            for name in sorted((read - seen) & homes.keys()):
                stage = min((s for s in homes[name] if s >= reached), default=reached)
                first[reached + 1 : stage + 1] = [i] * (stage - reached)
                reached = stage
            seen |= read
        return first[1:]

    def balanced(self) -> list[int]:
        """The cuts with the fewest seconds of a micro-batch, and even stages among equal ones."""
        if self.num_stages == 1:
            return []
        positions = sorted({*self._thin_positions(), *self._even_positions()})
        if len(positions) < self.num_stages - 1:
            positions = list(range(1, len(self.forward)))
        ways = math.comb(len(positions), self.num_stages - 1)
        if ways * len(self.seconds) <= TRIED_NODES:
            every = combinations(positions, self.num_stages - 1)
            starts = [list(min(every, key=self.cost))]
        else:
            crossing = [2 * self._moving(self.crossing[p]) for p in positions]
            work, forward = self._work(positions), self._work_of_forward(positions)
            starts = [
                self._divided(positions, work, crossing),
                self._divided(positions, forward, crossing),
                self._divided(positions, work, [0.0] * len(positions)),
            ]
        return min((self._moved(positions, start) for start in starts), key=self.cost)

    def _moved(self, positions: Sequence[int], best: list[int]) -> list[int]:
        """The best cuts that moves of one cut at a time lead to."""
        least = self.cost(best)
        better = True
        while better:
            better = False
            for k in range(len(best)):
                for other in self._neighbors(positions, best, k):
                    tried = [*best[:k], other, *best[k + 1 :]]
                    cost = self.cost(tried)
                    if cost < least * (1 - 1e-9):
                        best, least, better = tried, cost, True
        return best

    def _neighbors(self, positions: Sequence[int], cuts: list[int], k: int) -> Sequence[int]:
        low = cuts[k - 1] if k else 0
        high = cuts[k + 1] if k + 1 < len(cuts) else len(self.forward)
        at = bisect_left(positions, cuts[k])
        return [p for p in positions[max(0, at - 3) : at + 4] if low < p < high and p != cuts[k]]

    def cost(self, cuts: Sequence[int]) -> float:
        """`division_cost` of stages that begin at `cuts`; infinite for one without work."""
        stage = self.stages(cuts).stage
        work = self._sums(stage, len(cuts) + 1)
        if min(work) <= 0:
            return math.inf
        moving = [sum(map(self._moving, both)) for both in self._messages(stage, len(cuts))]
        return division_cost(work, moving)

    def _divided(
        self, positions: Sequence[int], work: Sequence[float], moving: Sequence[float]
    ) -> list[int]:
        """The best cuts at some of these positions, with this work of the pieces between them."""
        stages = balanced(work, moving, self.num_stages)
        return [p for p, (a, b) in zip(positions, pairwise(stages), strict=True) if a < b]

    def _work(self, cuts: Sequence[int]) -> list[float]:
        """The seconds of each stage."""
        return self._sums(self.stages(cuts).stage, len(cuts) + 1)

    def _work_of_forward(self, cuts: Sequence[int]) -> list[float]:
        """As `_work`, if the backward of each op is in its stage and takes twice its time."""
        bounds = [0, *cuts, len(self.forward)]
        forward = [sum(self.seconds[n] for n in self.forward[a:b]) for a, b in pairwise(bounds)]
        return [FORWARD_AND_BACKWARD * x for x in forward]

    def _sums(self, stage: Mapping[fx.Node, int], count: int) -> list[float]:
        work = [0.0] * count
        for node, at in stage.items():
            work[at] += self.seconds[node]
        return work

    def _messages(self, stage: Mapping[fx.Node, int], num_cuts: int) -> list[tuple[int, int]]:
        """The bytes from each stage to the next, and back; values for other stages have more time."""
        there, back = [0] * num_cuts, [0] * num_cuts
        for node, readers in self.readers.items():
            at = stage[node]
            to = {stage[u] for u in readers}
            if at + 1 in to:
                there[at] += nbytes_of(node)
            if at - 1 in to:
                back[at - 1] += nbytes_of(node)
        return list(zip(there, back, strict=True))

    def _moving(self, nbytes: int) -> float:
        return self.prices.message(nbytes) if nbytes else 0.0

    @cached_property
    def crossing(self) -> list[int]:
        """For each forward node the bytes that cross a cut right before it."""
        change = [0] * (len(self.forward) + 1)
        for i, node in enumerate(self.forward):
            ends = [self.position[u] for u in node.users if u in self.position]
            if ends and max(ends) > i:
                change[i + 1] += nbytes_of(node)
                change[max(ends) + 1 if max(ends) + 1 < len(change) else -1] -= nbytes_of(node)
        found, now = [], 0
        for step in change:
            now += step
            found.append(now)
        return found

    def _even_positions(self) -> list[int]:
        """The position of fewest crossing bytes in each of many stretches of as many nodes."""
        number = len(self.forward)
        stretch = math.ceil(number / (CANDIDATES * self.num_stages))
        every = range(1, number)
        return [
            min(every[i : i + stretch], key=self.crossing.__getitem__)
            for i in range(0, len(every), stretch)
        ]

    def _thin_positions(self) -> list[int]:
        """The position of fewest crossing bytes in each of many stretches of equal cost."""
        total = sum(self.seconds[n] for n in self.forward)
        stretch = total / (CANDIDATES * self.num_stages)
        best: dict[int, int] = {}
        sofar = 0.0
        for i, node in enumerate(self.forward):
            window = int(sofar / stretch) if stretch else i
            if i and (window not in best or self.crossing[i] < self.crossing[best[window]]):
                best[window] = i
            sofar += self.seconds[node]
        return sorted(best.values())


def _added_apart(moments: Moments) -> set[fx.Node]:
    """The additions of gradients that no stage sends (`tied.py`), and the linear ops behind them."""
    found = set[fx.Node]()
    open_ = [x for total in moments.sums for x in total.all_input_nodes[:1]]
    while open_:
        node = open_.pop()
        adds = node.target is torch.ops.aten.add.Tensor and len(node.all_input_nodes) == 2
        if len(node.users) == 1 and (adds or (is_linear(node) and len(node.all_input_nodes) == 1)):
            found.add(node)
            open_ += node.all_input_nodes
    return found


def _belongs(node: fx.Node, name: str) -> bool:
    module = node.meta.get("module") or ""
    return fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*")
