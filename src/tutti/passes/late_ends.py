"""`late_ends`: the reductions of a stage end in the last backward of the next stage of the same rank.

    last 2B    %8 = start(reduce_scatter, [%6], ...)       last 2B    %8 = start(reduce_scatter, [%6], ...)
               %9 = finish(%8, [%6])                  ->
    last 0B    %5 = start(reduce_scatter, [%3], ...)       last 0B    %9 = finish(%8, [%6])
                                                                      %5 = start(reduce_scatter, [%3], ...)

A rank with several stages ends their gradients one after the other: in between are backwards of other
micro-batches, beside which the links then work. The values of a stage wait for each other meanwhile; before
the first of these ends the sums of all stages are there anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import fx

from tutti.graph.analysis.collective_scratch import BEGUN
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import Body, LoopPart

_BEGIN = (collectives.start, collectives.together)


def late_ends(body: Body) -> Body:
    """The body with ends of reductions in later parts."""
    keys = {id(part): key for key, part in body.last.items()}
    row = [keys[id(part)] for part in body.played if id(part) in keys]
    last = dict(body.last)
    for key, later in pairwise(row):
        last[key], last[later] = _moved(last[key], last[later], f"{key[0]}{key[1]}")
    return replace(body, last=last)


def _moved(part: LoopPart, later: LoopPart, name: str) -> tuple[LoopPart, LoopPart]:
    """Two parts with the ends of the first one in the second; `name` is the first one's."""
    names = dict(zip(_results(part)[len(part.outputs) :], part.reduced, strict=True))
    ends = [node for node in part.graph.nodes if _may_wait(node, names)]
    if not ends:
        return part, later
    at = next((n for n in later.graph.nodes if n.target is collectives.start), None)
    at = at or next(n for n in later.graph.nodes if n.op != "placeholder")
    given = dict[fx.Node, fx.Node]()  # a value of the first part: an input of the second one

    def here(x: fx.Node) -> fx.Node:
        if x not in given:
            first = next(n for n in later.graph.nodes if n.op != "placeholder")
            with later.graph.inserting_before(first):
                given[x] = later.graph.placeholder(f"open_{name}_{x.name}")
            given[x].meta = {k: x.meta[k] for k in ("val", "sharding", BEGUN) if k in x.meta}
        return given[x]

    begun = {node: _begun(node) for node in ends}
    made = _copied(begun, later.graph, at, here)
    kept = {x: n for x, n in names.items() if x not in made}
    kept |= {x: str(new.target) for x, new in given.items()}
    later = _with_results(
        replace(later, totals=(*later.totals, *(str(x.target) for x in given.values()))),
        [*_results(later), *made.values()],
        (*later.reduced, *(names[x] for x in made)),
    )
    results = [*_results(part)[: len(part.outputs)], *kept]
    part = _with_results(part, results, tuple(kept.values()))
    for node in reversed(ends):
        for user in list(node.users):
            part.graph.erase_node(user)
        part.graph.erase_node(node)
    return part, later


def _may_wait(node: fx.Node, names: dict[fx.Node, str]) -> bool:
    """Whether a node ends a reduction of this part, whose values are results of the part."""
    begins = node.args[0] if node.target is collectives.finish else node
    if not isinstance(begins, fx.Node) or begins.target not in _BEGIN:
        return False
    return all(item in names and len(item.users) == 1 for item in node.users)


def _begun(node: fx.Node) -> fx.Node:
    """The start of a reduction that a node ends: a new one, if it carries out the whole reduction."""
    if node.target is collectives.finish:
        return node.args[0]  # type: ignore[return-value]
    with node.graph.inserting_before(node):
        start = node.graph.call_function(collectives.start, node.args)
    start.meta = {k: node.meta[k] for k in NOTES if k in node.meta}
    start.meta |= {"val": None, BEGUN: node.meta["val"]}
    return start


def _copied(
    begun: dict[fx.Node, fx.Node],
    graph: fx.Graph,
    at: fx.Node,
    here: Callable[[fx.Node], fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Copies before `at` of nodes that end reductions; their results, by those in the first graph."""
    made = dict[fx.Node, fx.Node]()
    for node, start in begun.items():
        args: Any = (here(start), [here(x) for x in start.args[1]])  # type: ignore[arg-type,union-attr]
        with graph.inserting_before(at):
            end = graph.call_function(collectives.finish, args)
            end.meta = dict(node.meta)
            for item in node.users:
                assert item.target is operator.getitem, item
                made[item] = graph.call_function(operator.getitem, (end, item.args[1]))
                made[item].meta = dict(item.meta)
    return made


def _results(part: LoopPart) -> list[fx.Node]:
    """The outputs of a part and the sums that it reduces."""
    both: Any = part.graph.output_node().args[0]
    return list(both[0])


def _with_results(part: LoopPart, results: list[fx.Node], reduced: tuple[str, ...]) -> LoopPart:
    output = part.graph.output_node()
    both: Any = output.args[0]
    output.args = ((results, both[1]),)
    return replace(part, reduced=reduced)
