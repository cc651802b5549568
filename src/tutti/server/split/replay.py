"""Captured steps with other inputs to their parts: oracles for servers.

stale     new state of (weights, slots)  =  update(weights, slots, gradient at (stale weights, batch))
given     new state of (weights, slots)  =  update(weights, slots, given gradients)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import fx

from tutti.capture.captured import Captured, copied
from tutti.graph.edits.edit import erase_dead

STALE, GIVEN = "stale/", "gradient/"


def stale(captured: Captured) -> Captured:
    """The step with each parameter twice: the update changes `NAME`, the forward and the backward read
    `stale/NAME`."""
    made = copied(captured)
    graph, names = made.graph, [n for n, k in made.kinds.items() if k == "parameter"]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for name in names:
        now = made.placeholder(name)
        with graph.inserting_before(first):
            before = graph.placeholder(STALE + name.replace(".", "_"))
        before.meta = {**now.meta, "name": STALE + name}
        now.replace_all_uses_with(before, delete_user_cb=_is_before_update)
    graph.lint()
    inputs = [*made.inputs, *(STALE + n for n in names)]
    return replace(made, inputs=inputs, kinds=made.kinds | {STALE + n: "batch" for n in names})


def given(
    captured: Captured,
    gradients: Mapping[str, fx.Node],
    *,
    kept: Collection[fx.Node] = (),
) -> Captured:
    """The step whose update takes `gradient/NAME` in place of each of `gradients`, values of its graph by
    variable; it returns these values after its own results.

    kept: values of the update that still depend on the step's own gradients.
    """
    made = copied(captured)
    graph = made.graph
    copies = dict(zip(captured.graph.nodes, graph.nodes, strict=True))
    own, old = {n: copies[x] for n, x in gradients.items()}, {copies[x] for x in kept}
    first, output = next(n for n in graph.nodes if n.op != "placeholder"), graph.output_node()
    taken: dict[fx.Node, fx.Node] = {}
    for name, x in own.items():
        with graph.inserting_before(first):
            fed = graph.placeholder(GIVEN + name.replace(".", "_"))
        fed.meta = {"val": x.meta["val"], "name": GIVEN + name, "kind": "batch"}
        taken.setdefault(x, fed)  # of variables that have one gradient any will do
    again: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(output):
        for node in [n for n in graph.nodes if _is_update(n) and n not in old]:
            again[node] = graph.node_copy(node, lambda x: again.get(x) or taken.get(x, x))
    returned, new = fx.map_arg(output.args[0], lambda x: again.get(x, x))  # type: ignore[misc]
    output.args = (([*returned, *own.values()], new),)  # type: ignore[misc]
    erase_dead(graph)
    graph.lint()
    inputs = [*made.inputs, *(GIVEN + n for n in own)]
    return replace(made, inputs=inputs, kinds=made.kinds | {GIVEN + n: "batch" for n in own})


def _is_before_update(user: fx.Node) -> bool:
    return user.op != "output" and not _is_update(user)


def _is_update(user: fx.Node) -> bool:
    return user.meta.get("region") == "update"
