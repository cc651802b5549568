"""`early_sends`: sends a value to another pipeline rank where it is made, not at the end of its part.

    %3 = relu(%2)                  %3 = relu(%2)
    %4 = conv(%3, %w)       ->     post(%3, "relu")         a skip that a later stage reads
    return [%3, %4]                %4 = conv(%3, %w)
                                   return [%3, %4]

Only if the rest of the part takes longer than the receiver needs to get ready, or waits for a reduction.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import fx

from tutti.graph.analysis.cost import seconds_of
from tutti.graph.edits.edit import NOTES
from tutti.graph.ops.loop import Body, LoopPart, post

# The least predicted time of the rest of the part.
LEAST_SECONDS = 2e-5


def early_sends(body: Body) -> int:
    """Rewrite the parts of `body`; returns the number of values sent earlier."""
    sent: dict[tuple[int, str], set[str]] = {}
    for (stage, kind, other), names in body.messages.items():
        if stage in body.stages and other not in body.stages:
            sent.setdefault((stage, kind), set()).update(names)
    return sum(_post(part, sent[key]) for key, part in body.every_part() if key in sent)


def _post(part: LoopPart, names: set[str]) -> int:
    both: Any = part.graph.output_node().args[0]
    made = dict(zip(part.outputs, both[0][: len(part.outputs)], strict=True))
    follows = _seconds_behind(part.graph)
    chosen = [
        (name, x)
        for name, x in made.items()
        if name in names
        and x.op == "call_function"
        and (part.reduced or follows[x] >= LEAST_SECONDS)
    ]
    for name, x in chosen:
        with part.graph.inserting_after(x):
            node = part.graph.call_function(post, (x, name))
        node.meta = {k: x.meta[k] for k in NOTES if k in x.meta} | {"val": None}
    return len(chosen)


def _seconds_behind(graph: fx.Graph) -> dict[fx.Node, float]:
    """The predicted time of all nodes after each node."""
    nodes = list(reversed(graph.nodes))
    sums = accumulate((seconds_of(n) for n in nodes), initial=0.0)
    return dict(zip(nodes, sums, strict=False))
