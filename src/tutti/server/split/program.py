"""Partitions the worker's part over the workers: gradients stay partial; the servers add them up.

The workers are an additional axis: each runs its rows of the batch, and gets global values (a count of valid
tokens, statistics of a batch norm, the returned loss) by small sums. So the count of the whole batch
normalizes losses, and the sum of the workers' gradients is the gradient. With `micro=K` a worker adds up the
gradients of K slices of its rows, and pushes the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from tutti.capture.captured import copied
from tutti.graph.edits.edit import erase_dead
from tutti.graph.ops import collectives
from tutti.graph.ops.matmul import is_faster
from tutti.layout import Layout, Sharding
from tutti.partition.partition import Program, partition
from tutti.passes.pass_table import left_out_by_environment, optimized
from tutti.passes.target import Target
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.propagate.plan import Place, plan
from tutti.server.split.worker_part import WorkerPart

WORKERS = ("replica",)
aten = torch.ops.aten
# Ops that only move numbers.
_VIEWS = (aten.reshape.default, aten.permute.default, aten.clone.default)


def worker_layout(layout: Layout, *, alone: bool) -> Layout:
    """The layout of a program of one worker, or of all of them; `layout` is that of the run."""
    return layout.of_one if alone else layout


def worker_program(
    part: WorkerPart,
    layout: Layout,
    place: Place | None = None,
    *,
    known: Mapping[str, Sharding] | None = None,
    strict: bool = False,
) -> Program:
    """Each worker's program under `layout` (of `worker_layout`); its gradients are partial.

    Args:
        place, known: as for `propagate.plan`.

    Raises:
        ShardingError: the batch does not divide by the workers, or a worker's rows by `data` or `micro`.
    """
    program = partition(plan(copied(part.captured), layout, place, known=known), strict=strict)
    if layout.num_replicas > 1:
        _leave_sums_open(program, part)
        program.graph.lint()
    return program


def _within(graph: fx.Graph, x: fx.Node, axes: tuple[str, ...], output: fx.Node) -> fx.Node:
    """The sum `x` over one worker's ranks and slices alone."""
    with graph.inserting_before(output):
        own = graph.call_function(collectives.all_reduce, (x.args[0], axes, "sum"))
    own.meta = dict(x.meta)
    return own


def in_slices(program: Program) -> Timed | None:
    """The program with its micro-batches one after the other; None if it has none.

    Raises:
        ShardingError: the step couples the samples of a batch.
    """
    target = _target(frozenset(program.captured.updated))
    return in_time(program, target=target) if program.layout.in_time else None


def played(program: Program, donated: frozenset[str] = frozenset()) -> fx.Graph:
    """The executed program: it joins sums between workers, and does not overlap them with computation.

    With micro-batches it is that of `in_slices`.
    """
    without = left_out_by_environment() | {"overlap"}
    return optimized(program, _target(donated), without=without)


def _target(donated: frozenset[str]) -> Target:
    """A worker's ranks exchange values without buffers in shared memory."""
    return Target(donated=donated, onednn=is_faster())


def _leave_sums_open(program: Program, part: WorkerPart) -> None:
    """Return each gradient's summand; of a replicated gradient, on one worker only."""
    output = program.graph.output_node()
    returned, new = output.args[0]  # type: ignore[misc]
    own, gradients, numbers = part.sections(list(returned))  # type: ignore[arg-type]
    opened = [_opened(program.graph, x, output) for x in gradients]
    output.args = (([*own, *opened, *numbers], new),)
    erase_dead(program.graph)
    live = set(program.graph.nodes)
    program.made = [m for m in program.made if m[1] in live]


def _opened(graph: fx.Graph, x: fx.Node, output: fx.Node) -> fx.Node:
    part = _part_of_sum(graph, x, output)
    if part is not None:
        return part
    with graph.inserting_before(output):
        once = graph.call_function(collectives.partialize, (x, WORKERS, "sum"))
    once.meta = dict(x.meta)
    return once


def _part_of_sum(graph: fx.Graph, x: fx.Node, output: fx.Node) -> fx.Node | None:
    """The summand of `x` over the workers; a view of a sum is a sum of views."""
    moves = x.target is collectives.all_gather
    summed = x.target is collectives.all_reduce and x.args[-1] == "sum"
    axes = collectives.axes_of(x) if summed or moves else ()
    if summed and WORKERS[0] in axes:
        own = tuple(a for a in axes if a not in WORKERS)
        return _within(graph, x, own, output) if own else x.args[0]  # type: ignore[return-value]
    linear = summed or moves or x.target in _VIEWS
    if not linear or WORKERS[0] in axes or len(x.all_input_nodes) != 1:
        return None
    part = _part_of_sum(graph, x.all_input_nodes[0], output)
    if part is None:
        return None
    with graph.inserting_before(output):
        viewed = graph.node_copy(x, lambda _: part)
    return viewed
