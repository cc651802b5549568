"""The predicted memory of a call as data: its peak by kind, and its course over the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import fx

from tutti.graph.analysis.liveness import held, row_walk
from tutti.graph.analysis.storage import Storages
from tutti.graph.edits.edit import source_of
from tutti.graph.text import op_name
from tutti.layout.budget import Budget
from tutti.partition.partition import Program
from tutti.planner.memory import PeakMemory, predict

# The most points of a course: the highest position of equal shares of the program each.
MOST_POINTS = 400


def memory_facts(program: Program, graph: fx.Graph | None) -> dict[str, Any]:
    """The peak of a call on this rank, by kind, and the bytes held over the positions of its `graph`.

    `course` lists (region, bytes, op, line): bytes include those held by the caller. `budget_nbytes` is the
    bound that `remat` gives, if any.
    """
    peak = predict(program, graph)
    made = asdict(peak)
    budget = Budget.parse(program.layout.remat)
    made["budget_nbytes"] = budget.nbytes if budget is not None else None
    made["source"] = _short(peak.source)
    for one in made["largest"]:
        one["source"] = _short(one["source"])
    made["course"] = course(program, graph, peak) if graph is not None else []
    return made


def course(program: Program, graph: fx.Graph, peak: PeakMemory) -> list[list[Any]]:
    """The course of memory, thinned to the highest of each share of the positions."""
    storages = Storages(graph, program.captured.mode)
    before = peak.peak_nbytes - peak.call_nbytes
    every = list(_positions(graph, storages))
    share = max(1, -(-len(every) // MOST_POINTS))
    shares = (every[i : i + share] for i in range(0, len(every), share))
    highest = (max(some, key=lambda entry: entry[1]) for some in shares)
    return [
        [
            node.meta.get("region") or "",
            before + nbytes,
            op_name(node) + do,
            _short(source_of(node)),
        ]
        for node, nbytes, do in highest
    ]


def _positions(graph: fx.Graph, storages: Storages) -> Iterator[tuple[fx.Node, int, str]]:
    """Each node of the graph, and of its loops in the order of their rows, the bytes of the call, and the
    entry of the row."""
    for node, nbytes in held(graph, storages):
        walk = row_walk(node, storages.mode)
        inside = walk.peak() if walk is not None else None
        if walk is None or inside is None:
            if node.op == "call_function":
                yield node, nbytes, ""
            continue
        for do, one, there in walk.course:
            yield one, nbytes - inside.nbytes + there, f" in {do}"


def _short(source: str) -> str:
    """`train.py:12`."""
    return os.path.basename(source)
