"""The passes in their order: each row gives a pass's rewrites, and the program without it.

A pass keeps the inputs of a graph, its outputs and their values. Without a pass
(`TUTTI_WITHOUT=in_place,bucket`) the program is slower or larger, but computes the same: so one measures a
pass, and finds a wrong one. A needed pass has no such name: without it the program is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tutti.environment import WITHOUT
from tutti.errors import LayoutError
from tutti.graph.analysis.collective_scratch import CARRIED_BY, GPUS, MEMORY, is_move
from tutti.graph.analysis.liveness import peak_with_given
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import REDUCE, Body, graphs_of, loop
from tutti.layout.budget import Budget
from tutti.partition.partition import Program
from tutti.passes.accumulate import accumulate
from tutti.passes.at_once import gathered_once, reduced_then_split
from tutti.passes.attention_memory import attention_memory
from tutti.passes.bucket import bucket
from tutti.passes.common import common, common_before_split
from tutti.passes.early_reductions import early_reductions
from tutti.passes.early_sends import early_sends
from tutti.passes.early_update import early_update
from tutti.passes.filled_slots import filled_slots
from tutti.passes.foreach import foreach
from tutti.passes.fused_update import fused_update
from tutti.passes.in_buffer import in_buffer
from tutti.passes.in_place import in_place
from tutti.passes.late_ends import late_ends
from tutti.passes.linear import linear
from tutti.passes.onednn import onednn
from tutti.passes.overlap import overlap
from tutti.passes.own_results import own_results
from tutti.passes.recompute import computed_once
from tutti.passes.remat import remat
from tutti.passes.rows import rows
from tutti.passes.shared_buffers import leave_buffers, place_buffers, shared_buffers
from tutti.passes.shared_state import (
    apart_from_state,
    copy_parts_given_away,
    shared_state,
    viewed_in_part,
    wait_for_readers,
)
from tutti.passes.simplify import simplify
from tutti.passes.target import Target


@dataclass(frozen=True)
class Setting:
    """The context of a graph that a pass rewrites.

    target: a part of a loop donates no state, since a later micro-batch reads it again.
    part: the kind of the part (`F`, `B`, ...); "" for the graph of the whole program.
    peak: predicts the bytes at the peak of a run of a graph that is still to be split in time, which it may
        change; None if the passes that follow make the executed program.
    """

    program: Program
    target: Target
    part: str = ""
    peak: Callable[[fx.Graph], int] | None = None


Rewrite = Callable[[fx.Graph, Setting], object]


@dataclass(frozen=True)
class Pass:
    """One row of the table.

    name: unique; `TUTTI_WITHOUT` omits an optional pass by it.
    needed: the pass cannot be left out.
    before_split: with a split of the batch in time, the pass runs before that split and not after it.
    on_program: rewrites the graph of the whole program. on_part: rewrites the graph of one part of a loop.
    on_loop: takes a loop whose parts the passes above have rewritten; returns its replacement.
    taken_back: undoes partition's form of the rewrite in either kind of graph. A pass with nothing else runs
        only if it is left out.
    """

    name: str
    on_program: Rewrite | None = None
    on_part: Rewrite | None = None
    on_loop: Callable[[Body], Body] | None = None
    taken_back: Callable[[fx.Graph], object] | None = None
    needed: bool = False
    before_split: bool = False

    def apply(self, graph: fx.Graph, setting: Setting) -> None:
        """Rewrite `graph` and its loops in place."""
        if self.on_program is not None:
            self.on_program(graph, setting)
        only_read = replace(setting.target, donated=frozenset())
        for node in _loops(graph):
            for (_, kind), part in _body(node).every_part():
                if self.on_part is not None:
                    self.on_part(part.graph, Setting(setting.program, only_read, kind))
            if self.on_loop is not None:
                node.update_arg(0, self.on_loop(_body(node)))  # type: ignore[arg-type]

    def take_back(self, graph: fx.Graph) -> None:
        """Undo partition's form of the rewrite in `graph` and in its loops."""
        for one in graphs_of(graph):
            if self.taken_back is not None:
                self.taken_back(one)


def _remat(graph: fx.Graph, setting: Setting) -> None:
    """Recompute within the budget of the final program, after the split in time or the passes that follow."""

    def peak(candidate: fx.Graph) -> int:
        for one in PASSES[[one.name for one in PASSES].index("remat") + 1 :]:
            if one.on_program and one.name not in left_out_by_environment():
                one.on_program(candidate, setting)
        return peak_with_given(candidate, mode)

    mode, layout = setting.program.captured.mode, setting.program.layout
    if (budget := Budget.parse(layout.remat)) is None:
        return
    stages = layout.axes.get("pipe", 1) > 1
    once = computed_once(graph, gathers=stages) if layout.in_time else ()
    remat(graph, mode, budget, setting.peak or peak, once)


def _over_what_dies(graph: fx.Graph, setting: Setting) -> None:
    in_place(graph, setting.target.donated)


def _buffers_of_part(graph: fx.Graph, setting: Setting) -> None:
    """The next micro-batch overwrites a buffer: a scattered result is new, a reduced one may be kept."""
    kinds = ("all_reduce", "reduce_scatter") if setting.part == REDUCE else ("reduce_scatter",)
    shared_buffers(graph, setting.target, kinds)


def _bucket(graph: fx.Graph, setting: Setting) -> None:
    bucket(graph, setting.target, setting.program.layout.mesh)


def _sent_early(body: Body) -> Body:
    early_sends(body)
    return body


def _note_carriers(graph: fx.Graph, target: Target) -> None:
    """Note the collectives between ranks that share memory, and those of a plan for GPUs."""
    for node in graph.nodes:
        if is_move(node) and collectives.axes_of(node) in target.shared:
            node.meta[CARRIED_BY] = MEMORY
        elif target.gpus and (is_move(node) or node.target is collectives.finish):
            node.meta[CARRIED_BY] = GPUS


def _alone(rewrite: Callable[[fx.Graph], object]) -> Rewrite:
    """A rewrite that reads only the graph."""
    return lambda graph, setting: rewrite(graph)


def _aimed(rewrite: Callable[[fx.Graph, Target], object]) -> Rewrite:
    """A rewrite that reads the target."""
    return lambda graph, setting: rewrite(graph, setting.target)


PASSES = (
    Pass("own_results", _alone(own_results), needed=True),
    Pass("reduce_scatter", taken_back=reduced_then_split),
    Pass("regather", taken_back=gathered_once),
    Pass("filled_slots", _alone(filled_slots), before_split=True),
    Pass("remat", _remat, before_split=True),
    Pass("rows", _alone(rows), _alone(rows)),
    Pass("simplify", _alone(simplify), _alone(simplify)),
    Pass("common", _alone(common), _alone(common)),
    Pass("early_reductions", _aimed(early_reductions)),
    Pass("foreach", _alone(foreach)),
    Pass("bucket", _bucket, _bucket),
    Pass("early_update", _aimed(early_update)),
    Pass("fused_update", _alone(fused_update)),
    Pass(
        "shared_state",
        lambda graph, setting: shared_state(graph, setting.program, setting.target),
        _aimed(viewed_in_part),
    ),
    Pass("own_views", _alone(own_results), needed=True),  # gathers have become views of state
    Pass("shared_buffers", _aimed(shared_buffers), _buffers_of_part),
    Pass("in_buffer", _alone(in_buffer)),
    Pass("overlap", _aimed(overlap), _aimed(overlap)),
    Pass("late_ends", on_loop=late_ends),
    Pass("in_place", _over_what_dies, _over_what_dies),
    Pass("linear", _alone(linear), _alone(linear)),
    Pass("onednn", _aimed(onednn), _aimed(onednn)),
    Pass("attention_memory", _alone(attention_memory), _alone(attention_memory), needed=True),
    Pass("early_sends", on_loop=_sent_early),
    Pass("accumulate", on_loop=accumulate),
    Pass("copy_parts_given_away", _alone(copy_parts_given_away), needed=True),
    Pass(
        "apart_from_state",
        lambda graph, setting: apart_from_state(graph, setting.program),
        needed=True,
    ),
    Pass("wait_for_readers", _alone(wait_for_readers), needed=True),
    Pass("leave_buffers", _alone(leave_buffers), needed=True),
    Pass("place_buffers", _alone(place_buffers), needed=True),
)


def optimized(
    program: Program, target: Target, *, without: Collection[str] | None = None
) -> fx.Graph:
    """A copy of the program's graph after every pass except those named in `without`.

    By default `without` has the names in `TUTTI_WITHOUT`. Raises `LayoutError` for an unknown name.
    """
    left_out = left_out_by_environment() if without is None else frozenset(without)
    refuse_unknown(left_out)
    graph = _copied(program.graph)
    is_split = any(_loops(graph))
    for one in PASSES:
        if one.name in left_out:
            one.take_back(graph)
        elif not (one.before_split and is_split):
            one.apply(graph, Setting(program, target))
    for one in graphs_of(graph):
        one.lint()
        _note_carriers(one, target)
    return graph


def ready_to_split(
    program: Program,
    target: Target,
    without: Collection[str],
    peak: Callable[[fx.Graph], int] | None = None,
) -> fx.Graph:
    """A copy of the program's graph after the passes that run before the split of the batch in time.

    `peak` predicts the bytes at the peak of a run of such a graph, which it may change. A budget of bytes
    needs it.
    """

    def finished(graph: fx.Graph) -> fx.Graph:
        if "common" not in without:
            common_before_split(graph, computed_once(graph, gathers=False))
        return graph

    asked = None if peak is None else lambda candidate: peak(finished(candidate))
    setting = Setting(program, target, peak=asked)
    graph = _copied(program.graph)
    for one in PASSES:
        if one.before_split and one.name not in without:
            one.apply(graph, setting)
    return finished(graph)


def optional_names() -> list[str]:
    """The names of the optional passes, in their order."""
    return [one.name for one in PASSES if not one.needed]


def left_out_by_environment() -> frozenset[str]:
    """The names in `TUTTI_WITHOUT`."""
    return frozenset(filter(None, WITHOUT.read().replace(" ", "").split(",")))


def refuse_unknown(names: Collection[str]) -> None:
    """Raise `LayoutError` for a name that is not an optional pass."""
    known = optional_names()
    for name in sorted(set(names) - set(known)):
        raise LayoutError(f'no pass is called "{name}"', fix=f"the passes are {', '.join(known)}")


def _loops(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.target is loop)


def _body(node: fx.Node) -> Body:
    body: Any = node.args[0]
    return body


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph; the parts of its loops are copied, too."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in _loops(copy):
        body = _body(node).with_graphs(lambda _, part: _copied(part))
        node.update_arg(0, body)  # type: ignore[arg-type]
    return copy
