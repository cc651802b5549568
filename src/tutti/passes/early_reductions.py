"""`early_reductions`: reduces sums over micro-batches beside the backward of the last of them.

    loop    %3 = mm(%g, %x)  -> sum            loop    %3 = mm(%g, %x)  -> sum
                                               last    %3 = mm(%g, %x)
    %9 = item(loop, 0)                ->               %4 = add_(%sum, %3)
    %10 = reduce_scatter(%9, data)                     %5 = reduce_scatter(%4, data)
    %11 = adamw([%w], [%10], ...)              %9 = item(loop, 0)
                                               %11 = adamw([%w], [%9], ...)

The last micro-batch then has a graph of its own. `bucket` and `overlap` place its reductions as without
micro-batches. In a pipeline the part `A` of a stage becomes one with its last backward.

Between hosts or GPUs only: ranks that share memory have nothing to overlap.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from tutti.graph.analysis.order import sole_readers
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import REDUCE, SEND, Body, LoopPart, loop
from tutti.passes.accumulate import added_to, total_like
from tutti.passes.bucket import SMALL_NBYTES
from tutti.passes.target import Target

Key = tuple[int, str]
# The nodes behind a sum that reduce it over ranks, by the sum's name.
Chains = Mapping[str, list[fx.Node]]


def early_reductions(graph: fx.Graph, target: Target) -> int:
    """Rewrite `graph` and its loops; returns the number of sums that a last micro-batch reduces."""
    count = 0
    for node in [n for n in graph.nodes if n.target is loop]:
        body: Any = node.args[0]
        body, few = _in_stages(body, target)
        node.update_arg(0, body)
        count += few + _behind(node, target)
    return count


def _apart(node: fx.Node, target: Target) -> bool:
    """Whether a node is a collective between hosts or GPUs."""
    is_one = node.target in collectives.COLLECTIVES
    return is_one and collectives.axes_of(node) not in target.shared


def _behind(node: fx.Node, target: Target) -> int:
    """Let the last micro-batch of a loop without stages reduce sums; returns their number.

    The reductions are behind the loop, in the graph around it.
    """
    body: Any = node.args[0]
    if len(body.parts) > 1 or (0, "B") not in body.parts:
        return 0
    part, found = body.parts[0, "B"], dict[str, tuple[int, fx.Node]]()
    for i, name in enumerate(body.results):
        items = [u for u in node.users if u.target is operator.getitem and u.args[1] == i]
        if len(items) == 1 and name in body.sums_of(part):
            found[name] = i, items[0]
    every = {
        name: sole_readers(item, lambda n: _apart(n, target)) for name, (_, item) in found.items()
    }
    chains = {name: chain for name, chain in every.items() if chain}
    if not chains.keys() & _gradients(part):
        return 0
    ends = {name: f"reduced_{name}" for name in chains}
    last = {(0, "B"): _ended(part, body, chains, ends)}
    results = tuple(ends.get(n, n) for n in body.results)
    node.update_arg(0, replace(body, last=last, results=results))
    vals = list(node.meta["val"])
    for name, chain in chains.items():
        (i, item), end = found[name], chain[-1]
        vals[i] = end.meta["val"]
        end.replace_all_uses_with(item)
        item.meta = {k: v for k, v in end.meta.items() if k in (*NOTES, "val", "sharding")}
        for gone in reversed(chain):
            node.graph.erase_node(gone)
    node.meta = node.meta | {"val": vals}
    return len(chains)


def _in_stages(body: Body, target: Target) -> tuple[Body, int]:
    """The body with the reductions of each stage in its last backward, and the number of sums reduced."""
    count = 0
    for stage, kind in list(body.parts):
        key = _last_backward(body, stage) if kind == REDUCE else None
        if key is None:
            continue
        reducing = body.parts[stage, REDUCE]
        moves = [n for n in reducing.graph.nodes if n.target in collectives.COLLECTIVES]
        if not all(_apart(n, target) for n in moves):
            continue
        both: Any = reducing.graph.output_node().args[0]
        given = zip(reducing.totals, reducing.graph.nodes, strict=False)
        chains = {name: sole_readers(x) for name, x in given}
        names = dict(zip(both[0], reducing.reduced, strict=True))
        ends = {name: names[chain[-1]] for name, chain in chains.items()}
        part = _ended(body.parts[key], body, chains, ends)
        parts = {k: p for k, p in body.parts.items() if k != (stage, REDUCE)}
        row = tuple(do for do in body.row if (do.stage, do.kind) != (stage, REDUCE))
        body = replace(body, parts=parts, row=row, last={**body.last, key: part})
        count += len(chains)
    return body, count


def _last_backward(body: Body, stage: int) -> Key | None:
    """The part of a stage before its reductions, but for sends; None if none of its sums is large."""
    before = [do for do in body.row if do.way != SEND]
    at = next(i for i, do in enumerate(before) if (do.stage, do.kind) == (stage, REDUCE))
    do = before[at - 1]
    if not at or do.way or do.stage != stage:
        return None
    totals = body.parts[stage, REDUCE].totals
    return (stage, do.kind) if _gradients(body.parts[stage, do.kind]) & set(totals) else None


def _gradients(part: LoopPart) -> set[str]:
    """The names of the sums that are worth it: of values that the backward makes, and that fill buckets.

    Small ones, and the loss, come at the end in any case.
    """
    both: Any = part.graph.output_node().args[0]
    made = zip(part.summed, both[1], strict=True)
    found = ((name, x) for name, x in made if x.meta.get("region") == "backward")
    return {name for name, x in found if x.meta["val"].nbytes > SMALL_NBYTES}


def _ended(part: LoopPart, body: Body, chains: Chains, ends: Mapping[str, str]) -> LoopPart:
    """The part of the last micro-batch, whose sums are complete and reduced.

    Args:
        part: of the others.
        body: of the loop.
        chains: of all sums to reduce, those of earlier parts among them.
        ends: the names of the results.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    output = graph.output_node()
    both: Any = output.args[0]
    outputs, summed = both
    own = body.sums_of(part)
    complete = dict(zip(own, summed, strict=False))
    totals = [n for n in chains if n not in complete]
    for name in totals:
        complete[name] = total_like(graph, name, chains[name][0].all_input_nodes[0])
    if body.num_micro > 1:
        totals += own
        for name in own:
            complete[name] = added_to(total_like(graph, name, complete[name]), complete[name])
    reduced = {ends.get(n, n): _copied(graph, x, chains.get(n, [])) for n, x in complete.items()}
    output.args = (([*outputs, *reduced.values()], summed[len(own) :]),)
    graph.lint()
    return LoopPart(
        graph,
        part.inputs,
        part.outputs,
        part.summed[len(own) :],
        totals=tuple(totals),
        reduced=tuple(reduced),
    )


def _copied(graph: fx.Graph, x: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """The end of a copy of a chain behind `x`; behind all inputs, if `x` is one."""
    end, place = x, x
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    for node in chain:
        source = end
        with graph.inserting_after(place):
            end = graph.node_copy(node, lambda _, source=source: source)
        place = end
    return end
