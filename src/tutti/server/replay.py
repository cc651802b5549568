"""A captured step that takes its gradient at other weights than it updates: an oracle for stale gradients.

new state of (weights, slots)  =  update(weights, slots, gradient at (stale weights, batch))
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tutti.capture.step import Captured, copied

STALE = "stale/"


def stale(captured: Captured) -> Captured:
    """The step with each parameter twice: `NAME`, which is updated, and `stale/NAME`, which the forward and
    the backward read."""
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


def _is_before_update(user: fx.Node) -> bool:
    return user.op != "output" and user.meta.get("region") != "update"
