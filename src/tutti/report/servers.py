"""The text of `explain` for a run with servers: the owner of each variable, and the traffic."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import fx

from tutti.comm.collectives.compression import NBYTES
from tutti.graph.text import text
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.planner.memory import predict
from tutti.quantities import format_nbytes
from tutti.report.collective_records import Record, records
from tutti.report.memory_table import memory_text
from tutti.report.pipeline import pipeline_text
from tutti.report.text_table import columns
from tutti.server.protocol import consistency
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.keys import VariableBlock, blocks
from tutti.server.protocol.update import ServedVariable
from tutti.server.split.program import in_slices, played
from tutti.server.split.three_parts import Split
from tutti.server.split.two_levels import REPLICA
from tutti.server.split.updater import GraphUpdater

# Small sums travel as float64.
_SUMMED_NBYTES = 8


def explain_servers(
    made: Split,
    program: Program,
    layout: Layout,
    *,
    graph: bool = False,
    measured: int | None = None,
    run: fx.Graph | None = None,
    timed: Timed | None = None,
    apart: bool | None = None,
) -> str:
    """The variables and their servers, the memory of a worker, the traffic of each step; with `graph` the
    worker's program and the servers' programs. `timed` is the program split in time, if known. `apart`:
    whether `program` is that of a worker whose pushes are separate updates; by default that of the run's
    first step."""
    due = consistency.parse(layout.sync)
    apart = due.alone(0) if apart is None else apart
    updater = GraphUpdater(made)
    timed = timed or in_slices(program)
    local = timed.programs[0] if timed else program
    every = blocks(updater.variables, layout.server)
    ranks = f" of {layout.worker_size} ranks" if layout.worker_size > 1 else ""
    final = run if run is not None else played(local, frozenset(local.captured.updated))
    parts = [
        f'layout "{layout}": {layout.num_replicas} workers{ranks}, {layout.server} servers',
        _variables(updater, every),
        _servers(every, layout.server, twice=due.predict),
        "a worker: " + memory_text(predict(local, final), measured),
        *([pipeline_text(timed)] if timed else []),
        _traffic(made, program, timed, layout, every, due, alone=apart),
    ]
    if graph:
        parts.append(f"# worker\n{text(local.graph)}")
        parts += [f"# update of {o.variable.name}\n{text(o.update.graph)}" for o in made.owned]
        parts += [f"# coupling\n{text(made.coupling.graph)}"] if made.coupling else []
    return "\n\n".join(parts)


def server_facts(made: Split, layout: Layout) -> list[dict[str, Any]]:
    """Each variable with the servers that keep its blocks, and its bytes, as data."""
    updater = GraphUpdater(made)
    every = blocks(updater.variables, layout.server)
    owners: dict[str, set[int]] = {}
    for b in every:
        owners.setdefault(b.variable.name, set()).add(b.server)
    return [
        {
            "name": v.name,
            "shape": list(v.shape),
            "servers": sorted(owners.get(v.name, ())),
            "num_blocks": sum(b.variable.name == v.name for b in every),
            "nbytes": _kept(v),
        }
        for v in updater.variables
    ]


def _variables(updater: GraphUpdater, every: tuple[VariableBlock, ...]) -> str:
    rows = []
    for v in updater.variables:
        own = [b for b in every if b.variable.name == v.name]
        kept = sorted({b.server for b in own})
        how = "by rows" if v.rows else "anywhere" if v.divisible else "whole"
        numbers = (v.name, str(list(v.shape)), how, str(len(own)), ", ".join(map(str, kept)))
        weight = v.dtype.itemsize * math.prod(v.shape)
        rows.append((*numbers, format_nbytes(weight), format_nbytes(_kept(v) - weight)))
    return columns(("variable", "shape", "cut", "blocks", "servers", "weight", "slots"), rows)


def _servers(every: tuple[VariableBlock, ...], num_servers: int, *, twice: bool) -> str:
    """The blocks of each server; with `twice` also the weights before the last update."""
    held: Counter[int] = Counter()
    for b in every:
        share = math.prod(b.shape) / max(1, math.prod(b.variable.shape))
        held[b.server] += round(_kept(b.variable) * share) + twice * b.nbytes
    count = Counter(b.server for b in every)
    kept = "weights, weights before the last update, and slots" if twice else "weights and slots"
    return "\n".join(
        f"server {s}: {count[s]} blocks, {format_nbytes(held[s])} of {kept}"
        for s in range(num_servers)
    )


def _kept(v: ServedVariable) -> int:
    """Bytes of a variable with its slots."""
    state = [(v.shape, v.dtype), *v.slots.values()]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in state)


def _phase(due: Consistency, alone: bool) -> str:
    """The steps of a program in a run that begins with common updates."""
    if alone:
        return f"after the first {due.after} steps, which are as under sync=step"
    return f"the first {due.after} steps; later each push is an update of its own"


def _inside(moved: list[Record], layout: Layout, weights: str) -> list[str]:
    """The traffic of a worker's program: sums over all workers, separate for each of its ranks, and the
    traffic between its ranks."""
    size, lines = layout.worker_size, []
    summed = [r for r in moved if REPLICA in r.axes]
    if summed:
        times = sum(r.times for r in summed)
        numbers = size * sum(r.times * math.prod(r.shape) for r in summed)
        nbytes = format_nbytes(_SUMMED_NBYTES * numbers)
        lines.append(f"small sums between workers, through a server: {times}, {nbytes}")
    if size > 1:
        own = [r for r in moved if REPLICA not in r.axes]
        count, nbytes = sum(r.times for r in own), sum(r.times * r.nbytes for r in own)
        lines.append(
            f"inside a worker of {size} ranks: the first hands on {weights}; {count} collectives, "
            f"{format_nbytes(nbytes)} a rank"
        )
    return lines


def _traffic(
    made: Split,
    program: Program,
    timed: Timed | None,
    layout: Layout,
    every: tuple[VariableBlock, ...],
    due: Consistency,
    *,
    alone: bool,
) -> str:
    own = [b for b in every if not b.variable.rows]
    nbytes = sum(b.nbytes for b in own)
    compressed = sum(math.prod(b.shape) * NBYTES.get(due.traffic, 0) for b in own)
    weights, pushed = format_nbytes(nbytes), format_nbytes(compressed or nbytes)
    numbers = len(made.numbers) + (len(made.scalars) if alone else 0)
    tables = [o.variable.name for o in made.owned if o.variable.rows]
    but = f", but of {', '.join(tables)} rows only" if tables else ""
    lines = [_phase(due, alone)] if due.both else []
    lines += [f"each worker and step: pulls {weights}, pushes {pushed} and {numbers} numbers{but}"]
    lines += _inside(records(program, timed), layout, weights)
    if made.coupling is not None:
        sums = sum(len(o.sums.outputs) for o in made.owned if o.sums is not None)
        where = "each worker on its own gradients" if alone else "servers, over all blocks"
        lines.append(f"coupling: {sums} sums -> {len(made.scalars)} scalars, by {where}")
    return "\n".join(lines)
