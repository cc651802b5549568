"""Describes a partitioned program: the sharding of state, every collective and its cause."""

from __future__ import annotations

import math
import os
from fnmatch import fnmatchcase
from types import NoneType

from torch import fx

from tutti.argument_types import check_type
from tutti.graph import text
from tutti.graph.edits.edit import source_of
from tutti.graph.ops.boundary import boundary
from tutti.layout import Sharding
from tutti.partition.partition import Program
from tutti.pipeline.ready import in_time
from tutti.pipeline.targets import target_here
from tutti.pipeline.timed import Timed
from tutti.planner.memory import predict, predict_pipe_ranks
from tutti.quantities import format_nbytes
from tutti.report.collective_records import Record, dtype_text, records
from tutti.report.memory_table import memory_text
from tutti.report.pipeline import pipeline_text
from tutti.report.rounds import rounds_text
from tutti.report.text_table import columns


def explain(
    program: Program,
    *,
    tensor: str | None = None,
    graph: bool = False,
    measured: int | None = None,
    run: fx.Graph | None = None,
    made: Timed | None = None,
) -> str:
    """The state, batch, memory, stages and collectives; with `tensor` (a name pattern) the
    provenance of its sharding, with `graph` the partitioned graph, of each pipeline rank.

    `measured`: measured bytes of a call. `run`: the executed graph here, `made`: the program split in time,
    if known.
    """
    kinds, fix = (str, NoneType), 'tensor="layers.0.*", a name or a pattern of names'
    check_type("tensor", tensor, kinds, wanted="a text", fix=fix)
    if tensor is not None:
        return "\n".join(_provenance(program, tensor))
    if made is None and program.layout.in_time:
        made = in_time(program)
    parts = [_header(program), _layout_table(program, made)]
    parts += ["found, for lack of a place:\n  " + "\n  ".join(program.plan.words)] * bool(
        program.plan.words
    )
    parts += [_batch_table(program)] if program.plan.samples else []
    parts += _memory(program, measured, run, made)
    if made is not None:
        parts.append(pipeline_text(made))
    parts.append(_collectives_table(program, made))
    if program.layout.num_replicas > 1 and not program.layout.server and program.captured.updated:
        parts.append(rounds_text(program, made))
    if program.fallbacks:
        parts.append("no rule, operands gathered whole:\n  " + "\n  ".join(program.fallbacks))
    if graph:
        graphs = [one.graph for one in made.programs] if made else [program.graph]
        several = len(graphs) > 1
        parts += [
            (f"# pipeline rank {i}\n" if several else "") + text.text(g)
            for i, g in enumerate(graphs)
        ]
    return "\n\n".join(parts)


def _memory(
    program: Program, measured: int | None, run: fx.Graph | None, made: Timed | None
) -> list[str]:
    """The predicted memory here, after a run, else of the pipeline rank with the most; of each."""
    assumed = "" if run is not None else _assumed(program)
    if made is None or len(made.programs) == 1:
        one = made.programs[0] if made else program
        return [memory_text(predict(one, run), measured) + assumed]
    every = predict_pipe_ranks(made)
    most = max(every, key=lambda memory: memory.peak_nbytes)
    peaks = ", ".join(format_nbytes(m.peak_nbytes) for m in every)
    here = predict(program, run) if run is not None else most
    return [
        memory_text(here, measured)
        + f"\npredicted peaks of pipeline ranks 0 to {len(every) - 1}: {peaks}"
        + assumed
    ]


def _assumed(program: Program) -> str:
    """What a prediction without a run assumes about the hosts of the ranks."""
    if program.layout.num_ranks == 1:
        return ""
    memory = "buffers in shared memory" if target_here(program).shared else "no shared memory"
    return f"\npredicted for ranks on this host alone, with {memory}"


def _header(program: Program) -> str:
    mesh = program.layout.mesh
    axes = str(mesh) or "of one rank"
    return f'layout "{program.layout}": {mesh.num_ranks} ranks, mesh {axes}'


def _layout_table(program: Program, made: Timed | None) -> str:
    rows, whole = [], 0
    pipe_ranks = range(len(made.programs)) if made else range(1)
    owners = made.owners if made and len(pipe_ranks) > 1 else {}
    totals = dict.fromkeys(pipe_ranks, 0)
    for state in program.captured.state:
        storage = program.storage[state.name]
        compute = program.plan.compute.get(state.name)
        itemsize = state.tensor.element_size()
        nbytes = math.prod(storage.local_shape(program.mesh)) * itemsize
        kept = owners.get(state.name, pipe_ranks)
        for pipe_rank in kept:
            totals[pipe_rank] += nbytes
        whole += state.tensor.numel() * itemsize
        rows.append(
            (
                state.name,
                dtype_text(state.tensor),
                str(list(state.tensor.shape)),
                sharding_text(storage),
                sharding_text(compute) if compute else "",
                *((", ".join(map(str, sorted(kept))),) if owners else ()),
                format_nbytes(nbytes),
                program.plan.reasons.get(state.name, ""),
            )
        )
    column = ("pipe",) if owners else ()
    head = ("state", "dtype", "shape", "stored", "computed", *column, "per rank", "")
    last = f"in all {format_nbytes(max(totals.values()))} per rank of {format_nbytes(whole)}"
    if owners:
        each = ", ".join(format_nbytes(n) for n in totals.values())
        last = f"in all {each} per rank of pipeline ranks 0 to {pipe_ranks[-1]}, of {format_nbytes(whole)}"
    return f"{columns(head, rows)}\n{last}"


def _batch_table(program: Program) -> str:
    """How ranks divide the tensors of the batch, and the reasons against a division."""
    rows = []
    for name, sharding in program.plan.samples.items():
        val = program.captured.placeholder(name).meta["val"]
        rows.append(
            (
                name,
                dtype_text(val),
                str(list(val.shape)),
                "in shards" if name in program.plan.shards else "whole",
                sharding_text(sharding),
                program.plan.reasons.get(name, ""),
            )
        )
    return columns(("batch", "dtype", "shape", "given", "computed", ""), rows)


def sharding_text(sharding: Sharding) -> str:
    """The axes that split each dim: `data, -`."""
    return (
        ", ".join(
            "*".join("+".join(seg.axes) or "-" for seg in dim) or "-" for dim in sharding.dims
        )
        or "-"
    )


def _collectives_table(program: Program, made: Timed | None) -> str:
    found = records(program, made)
    several = made is not None and len(made.programs) > 1
    grouped: dict[tuple[str, ...], list[Record]] = {}
    for r in found:
        cause = r.cause.partition(" (")[0]
        key = (os.path.basename(r.source), r.region, r.kind, r.dtype, "+".join(r.axes), cause)
        grouped.setdefault((str(r.pipe_rank), *key) if several else key, []).append(r)
    rows = [(*key, str(_count(of)), format_nbytes(_nbytes(of))) for key, of in grouped.items()]
    head = ("line", "region", "collective", "dtype", "over", "cause", "count", "bytes sent")
    last = f"{_count(found)} collectives a step, {format_nbytes(_nbytes(found))} sent by each rank"
    if several:
        assert made is not None
        of = [[r for r in found if r.pipe_rank == p] for p in range(len(made.programs))]
        totals = (
            f"{_count(r)} at pipeline rank {p}, {format_nbytes(_nbytes(r))}"
            for p, r in enumerate(of)
        )
        head, last = ("pipe", *head), f"collectives a step: {'; '.join(totals)} sent by each rank"
    return f"{columns(head, rows)}\n{last}" if rows else "no collectives"


def _count(found: list[Record]) -> int:
    return sum(r.times for r in found)


def _nbytes(found: list[Record]) -> int:
    return sum(r.nbytes * r.times for r in found)


def _provenance(program: Program, pattern: str) -> list[str]:
    """For each matching tensor: its sharding and the chain of nodes that propagated each axis."""
    spread, found = program.plan.spread, []
    for node in program.captured.graph.nodes:
        name = node.meta.get("name") or node.name
        if not (fnmatchcase(name, pattern) or fnmatchcase(node.meta.get("module") or "", pattern)):
            continue
        wanted = spread.of(node)
        marks = [
            m
            for m, kind in program.plan.boundaries.items()
            if kind.parameter and kind.parameter == node.meta.get("name")
        ]
        target = marks[0] if marks else node
        wanted = spread.of(target) if marks else wanted
        stored = program.storage.get(name)
        if (wanted is None and stored is None) or node.target is boundary:
            continue
        found.append(f"{name}: {wanted or 'whole'}" + (f"  (stored {stored})" if stored else ""))
        target = spread.alias.get(target, target)
        for axis in sorted(wanted.axes) if wanted else ():
            found += [f"  {axis}: {step}" for step in _chain(program, target, axis)]
    return found or [f'no tensor with a sharding matches "{pattern}"']


def _chain(program: Program, node: fx.Node, axis: str) -> list[str]:
    spread, steps = program.plan.spread, []
    seen: set[fx.Node] = set()
    while node not in seen:
        seen.add(node)
        via = spread.origin.get((node, axis))
        if via is None or isinstance(via, str):
            mark = program.plan.boundaries.get(node)
            name = (mark and mark.parameter) or node.meta.get("name") or node.name
            steps.append(f"from {name}: {via or 'given'}")
            break
        where = os.path.basename(source_of(via))
        steps.append(f"by {text.op_name(via)} at {where}")
        following = [
            x
            for x in (*via.all_input_nodes, via, *via.users)
            if x not in seen and (s := spread.of(x)) is not None and axis in s.axes
        ]
        following = [
            x for x in following if spread.origin.get((spread.alias.get(x, x), axis)) is not via
        ]
        if not following:
            break
        node = spread.alias.get(following[0], following[0])
    return steps
