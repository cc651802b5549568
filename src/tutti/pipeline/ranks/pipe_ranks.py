"""The pipeline ranks of all nodes outside of the micro-batches.

A *pipeline rank* is a coordinate along `pipe`. The pipeline rank of the first stage that reads state keeps
it. Nodes before the loop run on every pipeline rank that needs them; one with fewer bytes than its operands
(the cast of a tied weight to 16 bits) runs where these are, and crosses in their place. After the loop each
node runs where its operands are: the update of a weight at its pipeline rank; a node that couples several of
them (the norm of all gradients) at all of them, from a few small tensors that they exchange; a large value
from several (the gradient of a tied weight) at one. Python's numbers (`.item()` of a norm) are not sent: each
pipeline rank reads its own from such a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from tutti.graph.analysis.cost import nbytes_of
from tutti.graph.analysis.state import is_state
from tutti.pipeline.micro_batches.moments import AFTER, BEFORE, Moments
from tutti.pipeline.stages.stage_parts import early_part

# Values of up to this many elements go to every pipeline rank, rather than one that works for all.
SMALL = 4096
# The types of a node's value that is a Python number, not a tensor.
NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Transfer:
    """A transfer of `node` between pipeline ranks: ready `after` one position, needed `until` another."""

    node: fx.Node
    source: int
    to: int
    after: int
    until: int


@dataclass
class PipelinePlan:
    """The work of each pipeline rank, in positions: nodes before the loop, the loop, nodes after it."""

    order: list[fx.Node]
    loop_at: int
    works: list[set[fx.Node]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def position(self, node: fx.Node) -> int:
        """The position of a node."""
        return self._positions[node]

    def __post_init__(self) -> None:
        before, after = self.order[: self.loop_at], self.order[self.loop_at :]
        self._positions = {n: i for i, n in enumerate(before)}
        self._positions |= {n: self.loop_at + 1 + i for i, n in enumerate(after)}

    @property
    def end(self) -> int:
        """The position behind all others."""
        return len(self.order) + 1


def plan_pipe_ranks(
    moments: Moments,
    num_pipe_ranks: int,
    owners: dict[str, frozenset[int]],
    made_at: dict[fx.Node, int],
    given: list[list[fx.Node]],
    results: Iterable[tuple[fx.Node, frozenset[int]]],
) -> PipelinePlan:
    """Assign nodes to pipeline ranks.

    Args:
        owners: the pipeline ranks that keep each state tensor.
        made_at: for each result of a loop, the pipeline rank of that loop.
        given: the values that the loop of each pipeline rank reads.
        results: nodes needed at the end, and their pipeline ranks.
    """
    before = [n for n in moments.graph.nodes if moments.when[n] == BEFORE]
    after = [n for n in moments.graph.nodes if moments.when[n] == AFTER and n.op != "output"]
    plan = PipelinePlan([*before, *after], len(before), [set() for _ in range(num_pipe_ranks)])
    can = _possible_pipe_ranks(plan, moments, num_pipe_ranks, owners, made_at)
    needs: list[dict[fx.Node, int]] = [{} for _ in range(num_pipe_ranks)]

    def need(pipe_rank: int, node: fx.Node, until: int) -> None:
        needs[pipe_rank][node] = min(until, needs[pipe_rank].get(node, until))

    for node, pipe_ranks in results:
        for pipe_rank in pipe_ranks:
            need(pipe_rank, node, plan.end)
    for pipe_rank, nodes in enumerate(given):
        for node in nodes:
            need(pipe_rank, node, plan.loop_at)
    for node in reversed(plan.order):
        here = plan.position(node)
        bound = _is_bound(node, moments) or _is_narrow(node, can)
        own = frozenset(can[node]) if bound else frozenset(range(num_pipe_ranks))
        for pipe_rank in [p for p in range(num_pipe_ranks) if node in needs[p] and p not in own]:
            source = min(own)
            made = plan.loop_at if node in made_at else here
            plan.transfers.append(Transfer(node, source, pipe_rank, made, needs[pipe_rank][node]))
            need(source, node, plan.end)
        for pipe_rank in own:
            if node in needs[pipe_rank]:
                plan.works[pipe_rank].add(node)
                for x in [] if node in made_at else _operands(node, moments):
                    need(pipe_rank, x, here)
    return plan


def _is_bound(node: fx.Node, moments: Moments) -> bool:
    """Whether a node belongs to certain pipeline ranks: state, and nodes after the loop."""
    return is_state(node) or moments.when[node] == AFTER


def _is_narrow(node: fx.Node, can: dict[fx.Node, frozenset[int]]) -> bool:
    """Whether a node has fewer bytes than its operands: then it crosses in their place, such as the cast of a
    tied weight to 16 bits."""
    operands = node.all_input_nodes
    return bool(operands) and nbytes_of(node) < sum(nbytes_of(x) for x in operands if x in can)


def _operands(node: fx.Node, moments: Moments) -> list[fx.Node]:
    """The operands of `node` from outside."""
    if any(node in level for level in moments.early):
        return early_part(moments, node)[1]
    return list(node.all_input_nodes)


def _possible_pipe_ranks(
    plan: PipelinePlan,
    moments: Moments,
    num_pipe_ranks: int,
    owners: dict[str, frozenset[int]],
    made_at: dict[fx.Node, int],
) -> dict[fx.Node, frozenset[int]]:
    everywhere = frozenset(range(num_pipe_ranks))
    can: dict[fx.Node, frozenset[int]] = {}
    for node in plan.order:
        if node in made_at:
            can[node] = frozenset({made_at[node]})
        elif is_state(node):
            can[node] = owners[node.meta["name"]]
        elif isinstance(node.meta.get("val"), NUMBERS):
            can[node] = everywhere
        else:
            inputs = [x for x in _operands(node, moments) if x in can]
            can[node] = _together(inputs, can, everywhere)
    return can


def _together(
    inputs: list[fx.Node], can: dict[fx.Node, frozenset[int]], everywhere: frozenset[int]
) -> frozenset[int]:
    """The pipeline ranks that run a node with these operands."""
    common = everywhere.intersection(*(can[x] for x in inputs))
    if common:
        return common
    bound = [x for x in inputs if can[x] != everywhere]
    if all(_numel(x) <= SMALL for x in bound):
        return everywhere
    large = [x for x in bound if _numel(x) > SMALL]
    pipe_ranks = sorted(everywhere)
    return frozenset({max(pipe_ranks, key=lambda p: (sum(p in can[x] for x in large), -p))})


def _numel(node: fx.Node) -> int:
    val = node.meta.get("val")
    if isinstance(val, list | tuple):
        return max((x.numel() for x in val if isinstance(x, Tensor)), default=0)
    return val.numel() if isinstance(val, Tensor) else 1


def bundles(transfers: Iterable[Transfer]) -> list[tuple[int, int, int, list[fx.Node]]]:
    """Messages `(position, source, to, nodes)`: each as late as possible, with all nodes ready by then.

    Every pipeline rank processes them in the order of the list, so no ring of waits can form.
    """
    edges: dict[tuple[int, int], list[Transfer]] = {}
    for one in transfers:
        edges.setdefault((one.source, one.to), []).append(one)
    found = []
    for (source, to), waiting in edges.items():
        rest = sorted(waiting, key=lambda t: t.until)
        while rest:
            at = rest[0].until
            now = [t for t in rest if t.after < at]
            rest = [t for t in rest if t.after >= at]
            found.append((at, source, to, [t.node for t in now]))
    return sorted(found, key=lambda m: m[:3])
