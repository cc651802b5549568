"""What `explain` says of a program, as data: JSON values, for the records of a run."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import fx

from tutti.layout import Mesh, Sharding
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.planner.stages import forecast
from tutti.report.collective_records import Record, dtype_text, num_sent, records
from tutti.report.explanation import sharding_text

MOST_TENSORS, MOST_SPANS = 20_000, 4_000


def program_facts(program: Program, made: Timed | None, graph: fx.Graph | None) -> dict[str, Any]:
    """The mesh, every tensor, every kind of collective, the schedule, the ops without a rule.

    `made` is the program split in time, if it is; `graph` the final one of this rank, if it is known.
    """
    staged = made is not None and len(made.programs) > 1
    mesh = program.layout.mesh
    return {
        "layout": str(program.layout),
        "mesh": [list(axis) for axis in mesh.axes],
        "tensors": _tensors(program, made),
        "batch": _batch(program),
        "collectives": _collectives(program, made),
        # The records of a pipeline are those of all its ranks, and the graph is of one.
        "num_sent": num_sent(graph) if graph is not None and not staged else None,
        "pipeline": _pipeline(made) if made is not None else None,
        "fallbacks": list(program.fallbacks),
    }


def _tensors(program: Program, made: Timed | None) -> list[dict[str, Any]]:
    several = made is not None and len(made.programs) > 1
    owners = made.owners if made is not None and several else {}
    found = []
    for state in program.captured.state[:MOST_TENSORS]:
        storage = program.storage[state.name]
        compute = program.plan.compute.get(state.name)
        itemsize = state.tensor.element_size()
        found.append(
            {
                "name": state.name,
                "kind": state.kind,
                "owner": state.owner,
                "dtype": dtype_text(state.tensor),
                "shape": list(state.tensor.shape),
                "stored": sharding_text(storage),
                "computed": sharding_text(compute) if compute else "",
                "axes": _axes_of(storage, program.layout.mesh),
                "nbytes": math.prod(storage.local_shape(program.mesh)) * itemsize,
                "whole_nbytes": state.tensor.numel() * itemsize,
                "pipe": sorted(owners[state.name]) if state.name in owners else None,
                "reason": program.plan.reasons.get(state.name, ""),
            }
        )
    return found


def _axes_of(sharding: Sharding, mesh: Mesh) -> list[list[str]]:
    """For each dim the axes of ranks that split it, major to minor."""
    return [[a for seg in dim for a in seg.axes if a in mesh] for dim in sharding.dims]


def _batch(program: Program) -> list[dict[str, Any]]:
    found = []
    for name, sharding in program.plan.samples.items():
        val = program.captured.placeholder(name).meta["val"]
        found.append(
            {
                "name": name,
                "dtype": dtype_text(val),
                "shape": list(val.shape),
                "given": "in shards" if name in program.plan.shards else "whole",
                "computed": sharding_text(sharding),
                "reason": program.plan.reasons.get(name, ""),
            }
        )
    return found


def _collectives(program: Program, made: Timed | None) -> list[dict[str, Any]]:
    """Grouped as in the table of `explain`."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for r in records(program, made):
        cause = r.cause.partition(" (")[0]
        where = r.pipe_rank, os.path.basename(r.source), r.region
        grouped.setdefault((*where, r.kind, r.dtype, "+".join(r.axes), cause), []).append(r)
    names = ("pipe", "line", "region", "kind", "dtype", "over", "cause")
    return [
        dict(zip(names, key, strict=True))
        | {"count": sum(r.times for r in of), "nbytes": sum(r.times * r.nbytes for r in of)}
        for key, of in grouped.items()
    ]


def _pipeline(made: Timed) -> dict[str, Any]:
    """The stages, the messages, and the simulated schedule; times are for comparison only."""
    found = forecast(made)
    shown: dict[str, Any] = {
        "num_micro": made.bodies[0].num_micro,
        "stages": [
            {
                "number": s.number,
                "pipe": s.pipe_rank,
                "seconds": s.seconds,
                "modules": list(s.modules)[:12],
                "line": os.path.basename(s.source),
            }
            for s in found.stages
        ],
        "messages": [
            {
                "from": m.pipe_ranks[0],
                "to": m.pipe_ranks[1],
                "nbytes": m.nbytes,
                "times": m.times,
                "line": os.path.basename(m.source),
            }
            for m in found.messages
        ],
    }
    timeline = found.timeline
    if timeline is not None and sum(map(len, timeline.rows)) <= MOST_SPANS:
        shown["rows"] = [
            [[str(s.action), s.action.kind, s.start, s.end] for s in row] for row in timeline.rows
        ]
        shown |= {"seconds": timeline.seconds, "idle_share": timeline.idle_share}
    return shown
