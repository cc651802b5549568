"""The passes in their order; each has a name by which it can be left out.

A pass rewrites the graph of one rank's program in place and keeps its inputs, its outputs and their
values. Left out by name (`TUTTI_WITHOUT=in_place,bucket`), the program is slower or larger, never
another one: that is how a pass is measured, and how a wrong one is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from tutti.environment import WITHOUT
from tutti.errors import LayoutError
from tutti.graph.liveness import peak_with_given
from tutti.graph.loop import REDUCE, loop
from tutti.layout.budget import Budget
from tutti.partition.partition import Program
from tutti.passes.accumulate import accumulate
from tutti.passes.at_once import gathered_once, reduced_then_split
from tutti.passes.bucket import bucket
from tutti.passes.common import common
from tutti.passes.early_sends import early_sends
from tutti.passes.early_update import early_update
from tutti.passes.foreach import foreach
from tutti.passes.fused_update import fused_update
from tutti.passes.in_buffer import in_buffer
from tutti.passes.in_place import in_place
from tutti.passes.linear import linear
from tutti.passes.onednn import onednn
from tutti.passes.overlap import overlap
from tutti.passes.own_results import own_results
from tutti.passes.remat import remat
from tutti.passes.rows import rows
from tutti.passes.shared_buffers import leave_buffers, place_buffers, shared_buffers
from tutti.passes.shared_state import (
    copy_parts_given_away,
    shared_state,
    viewed_in_part,
    wait_for_readers,
)
from tutti.passes.simplify import simplify
from tutti.passes.target import Target


def _already(graph: fx.Graph, program: Program, target: Target) -> None:
    """Nothing to do: partition has written it so."""


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a program's graph.

    taken_back: where partition has done it, what undoes it when it is left out.
    """

    name: str
    run: Callable[[fx.Graph, Program, Target], object] = _already
    taken_back: Callable[[fx.Graph], object] | None = None


def _remat(graph: fx.Graph, program: Program, target: Target) -> None:
    """Its budget is one of the program as it will run, with the passes that follow."""

    if any(node.target is loop for node in graph.nodes):
        return  # done before the batch was split in time

    def peak(candidate: fx.Graph) -> int:
        later = PASSES[[one.run for one in PASSES].index(_remat) + 1 :]
        for one in later:
            if one.name not in left_out_by_environment():
                one.run(candidate, program, target)
        return peak_with_given(candidate, mode)

    mode = program.captured.mode
    remat(graph, mode, Budget.parse(program.layout.remat), peak)


PASSES = (
    Pass("reduce_scatter", taken_back=reduced_then_split),
    Pass("regather", taken_back=gathered_once),
    Pass("remat", _remat),
    Pass("rows", lambda graph, program, target: rows(graph)),
    Pass("simplify", lambda graph, program, target: simplify(graph)),
    Pass("common", lambda graph, program, target: common(graph)),
    Pass("foreach", lambda graph, program, target: foreach(graph)),
    Pass("bucket", lambda graph, program, target: bucket(graph, target)),
    Pass("early_update", lambda graph, program, target: early_update(graph, target)),
    Pass("fused_update", lambda graph, program, target: fused_update(graph)),
    Pass("shared_state", shared_state),
    Pass("shared_buffers", lambda graph, program, target: shared_buffers(graph, target)),
    Pass("in_buffer", lambda graph, program, target: in_buffer(graph)),
    Pass("overlap", lambda graph, program, target: overlap(graph, target)),
    Pass("in_place", lambda graph, program, target: in_place(graph, target.donated)),
    Pass("linear", lambda graph, program, target: linear(graph)),
    Pass("onednn", lambda graph, program, target: onednn(graph, target)),
    Pass("early_sends"),  # of the parts of loops, after the rest
    Pass("accumulate"),
)


def optimized(
    program: Program, target: Target, *, without: Collection[str] | None = None
) -> fx.Graph:
    """A copy of the program's graph with every pass applied but those named in `without`.

    `without` is what `TUTTI_WITHOUT` names by default. Raises `LayoutError` for an unknown name.
    """
    left_out = left_out_by_environment() if without is None else frozenset(without)
    refuse_unknown(left_out)
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    own_results(graph)
    for one in PASSES:
        if one.name not in left_out:
            one.run(graph, program, target)
        elif one.taken_back is not None:
            one.taken_back(graph)
        if one.run is shared_state:
            own_results(graph)
    for node in graph.nodes:
        if node.target is loop:
            body, given = node.args
            body = body.with_graphs(lambda kind, g: _part(kind, g, target, left_out))
            if "early_sends" not in left_out:
                early_sends(body)
            node.args = (body if "accumulate" in left_out else accumulate(body), given)
    copy_parts_given_away(graph)
    wait_for_readers(graph)
    leave_buffers(graph)
    place_buffers(graph)
    graph.lint()
    return graph


# What lies in buffers is overwritten in the next micro-batch: what is scattered is new, the rest may be kept.
IN_BUFFERS = {REDUCE: ("all_reduce", "reduce_scatter")}
SCATTERED = ("reduce_scatter",)


def _part(kind: str, graph: fx.Graph, target: Target, left_out: Collection[str]) -> fx.Graph:
    """A copy of a part's graph with the passes that fit it; the others are about the update.

    All that it is given is read again.
    """
    passes: dict[str, Callable[[fx.Graph], object]] = {
        "rows": rows,
        "simplify": simplify,
        "common": common,
        "bucket": lambda g: bucket(g, target),
        "shared_state": lambda g: viewed_in_part(g, target),
        "shared_buffers": lambda g: shared_buffers(g, target, IN_BUFFERS.get(kind, SCATTERED)),
        "overlap": lambda g: overlap(g, target),
        "in_place": lambda g: in_place(g, ()),
        "linear": linear,
        "onednn": lambda g: onednn(g, target),
    }
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for one in PASSES:
        if one.name not in left_out and one.name in passes:
            passes[one.name](copy)
        elif one.name in left_out and one.taken_back is not None:
            one.taken_back(copy)
    copy.lint()
    return copy


def rematerialized(program: Program, target: Target, without: Collection[str]) -> fx.Graph:
    """A copy of the program's graph with what the layout's `remat` asks for, unless that is left out."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    if "remat" not in without:
        _remat(graph, program, target)
    return graph


def left_out_by_environment() -> frozenset[str]:
    """The names in `TUTTI_WITHOUT`."""
    return frozenset(filter(None, WITHOUT.read().replace(" ", "").split(",")))


def refuse_unknown(names: Collection[str]) -> None:
    """Raise `LayoutError` for a name that no pass has."""
    known = [one.name for one in PASSES]
    for name in sorted(set(names) - set(known)):
        raise LayoutError(f'no pass is called "{name}"', fix=f"the passes are {', '.join(known)}")
