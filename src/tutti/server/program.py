"""The worker's part partitioned over the workers: gradients stay parts of sums, which the servers add up.

As with `data=W` each worker runs its rows of the batch, and what it needs of the others (a count of valid
tokens, statistics of a batch norm, the loss to return) is a small sum. So losses are normalized by the count
of the whole batch, and the sum of the workers' gradients is the gradient. With `micro=K` a worker adds up
what K slices of its rows give, and pushes the sum.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.capture.canonical import erase_dead
from tutti.capture.step import copied
from tutti.graph import collectives
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.passes.order import left_out_by_environment, optimized
from tutti.passes.target import Target
from tutti.pipeline.over_time import MICRO
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.propagate.plan import plan
from tutti.server.worker import WorkerPart

DATA = ("data",)
aten = torch.ops.aten
# Ops that only move numbers.
_VIEWS = (aten.reshape.default, aten.permute.default, aten.clone.default)


def worker_layout(layout: Layout, num_workers: int) -> Layout:
    """The layout of the workers' program: `layout` is that of the run."""
    axes = {"data": num_workers} if num_workers > 1 else {}
    return Layout(axes=axes, micro=layout.micro, precision=layout.precision, remat=layout.remat)


def worker_program(part: WorkerPart, layout: Layout, *, strict: bool = False) -> Program:
    """What each worker runs under `layout` (of `worker_layout`); gradients come out as parts of sums.

    Raises:
        ShardingError: the batch does not divide by the workers, or a worker's rows by `micro`.
    """
    program = partition(plan(copied(part.captured), layout), strict=strict)
    if layout.num_ranks > 1:
        _leave_sums_open(program, part)
        program.graph.lint()
    return program


def in_slices(program: Program) -> Timed | None:
    """The program with its micro-batches one after the other; None where it has none.

    Raises:
        ShardingError: the step couples the samples of a batch.
    """
    return in_time(program) if program.layout.in_time else None


def played(program: Program, donated: frozenset[str] = frozenset()) -> fx.Graph:
    """The program as it runs: sums between workers are joined, but nobody computes while one is formed.

    One with micro-batches is that of `in_slices`.
    """
    without = left_out_by_environment() | {"overlap"}
    return optimized(program, Target(donated=donated), without=without)


def _leave_sums_open(program: Program, part: WorkerPart) -> None:
    """Give out of each gradient what was to be summed; of one that is whole everywhere, once."""
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
        once = graph.call_function(collectives.partialize, (x, DATA, "sum"))
    once.meta = dict(x.meta)
    return once


def _part_of_sum(graph: fx.Graph, x: fx.Node, output: fx.Node) -> fx.Node | None:
    """What becomes `x` when it is summed over the workers; views of a sum are sums of views."""
    summed = x.target is collectives.all_reduce and x.args[-1] == "sum"
    axes = collectives.axes_of(x) if summed else ()
    if axes == DATA:
        return x.args[0]  # type: ignore[return-value]
    if DATA[0] in axes:
        with graph.inserting_before(output):
            own = graph.call_function(collectives.all_reduce, (x.args[0], (MICRO,), "sum"))
        own.meta = dict(x.meta)
        return own
    if not summed and (x.target not in _VIEWS or len(x.all_input_nodes) != 1):
        return None
    part = _part_of_sum(graph, x.all_input_nodes[0], output)
    if part is None:
        return None
    with graph.inserting_before(output):
        viewed = graph.node_copy(x, lambda _: part)
    return viewed
