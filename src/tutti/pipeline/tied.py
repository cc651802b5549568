"""A gradient to which several stages add, such as that of a tied weight.

sum(a + b)  ->  sum(a) + sum(b)         so that no stage sends a weight's gradient in every micro-batch
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.graph import collectives
from tutti.pipeline.cut import Stages
from tutti.pipeline.moments import AFTER, Moments

aten = torch.ops.aten


def add_apart(moments: Moments, stages: Stages, total: fx.Node) -> bool:
    """Let each stage add its part of `total` up, and one addition follow the loop; whether that was to do."""
    made: Any = total.args[0]
    if made.target is not aten.add.Tensor or len(made.users) != 1 or total.args[2:] != ("sum",):
        return False
    homes = {stages.stage.get(x) for x in made.all_input_nodes}
    if len(homes) < 2 or None in homes or len(made.args) != 2:
        return False
    graph, apart = moments.graph, []
    for x in made.args:
        with graph.inserting_before(total):
            one = graph.call_function(collectives.all_reduce, (x, *total.args[1:]))
        one.meta = {**total.meta, "val": x.meta["val"]}
        apart.append(one)
    with graph.inserting_before(total):
        both = graph.call_function(aten.add.Tensor, tuple(apart))
    both.meta = dict(total.meta)
    total.replace_all_uses_with(both)
    for old in (total, made):
        graph.erase_node(old)
        moments.forget(old)
        stages.stage.pop(old, None)
    moments.sums += apart
    for node in (*apart, both):
        moments.when[node] = AFTER
        moments.stateful.add(node)
    return True
