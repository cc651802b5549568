"""Gradients with terms from several stages, such as that of a tied weight.

    sum(a + b)              ->  sum(a) + sum(b)
    sum(scatter(a + b))     ->  sum(scatter(a)) + sum(scatter(b))

So no stage sends a weight's gradient in every micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.graph.ops import collectives
from tutti.pipeline.micro_batches.moments import AFTER, DURING, Moments, is_linear
from tutti.pipeline.stages.cut import Stages

aten = torch.ops.aten


def add_apart(moments: Moments, stages: Stages, total: fx.Node) -> bool:
    """Let each stage sum its part of `total`, and add these after the loop; return whether that applied."""
    chain, made = _linear_from(total)
    if made.target is not aten.add.Tensor or len(made.users) != 1 or total.args[2:] != ("sum",):
        return False
    homes = {stages.stage.get(x) for x in made.all_input_nodes}
    if len(homes) < 2 or None in homes or len(made.args) != 2:
        return False
    writer = _Apart(moments, stages, total)
    writer.add([writer.sum_of(x, chain) for x in made.all_input_nodes])
    for old in (total, *chain, made):
        moments.graph.erase_node(old)
        moments.forget(old)
        stages.stage.pop(old, None)
    return True


def _linear_from(total: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The linear ops before the sum, the last one first, and their first operand."""
    chain, made = list[fx.Node](), total.all_input_nodes[0]
    while is_linear(made) and len(made.users) == 1 and len(made.all_input_nodes) == 1:
        chain.append(made)
        made = made.all_input_nodes[0]
    return chain, made


class _Apart:
    def __init__(self, moments: Moments, stages: Stages, total: fx.Node) -> None:
        self.moments, self.stages, self.total = moments, stages, total
        self.graph = moments.graph

    def sum_of(self, x: fx.Node, chain: list[fx.Node]) -> fx.Node:
        """The sum of `chain` applied to `x`, at the stage of `x`."""
        stage = self.stages.stage[x]
        for op in reversed(chain):
            x = self._call(op.target, (x, *op.args[1:]), op, DURING)
            self.stages.stage[x] = stage
        made = self._call(collectives.all_reduce, (x, *self.total.args[1:]), self.total, AFTER)
        made.meta["val"] = x.meta["val"]
        self.moments.sums.append(made)
        return made

    def add(self, apart: list[fx.Node]) -> None:
        """Replace `total` by the addition of the sums."""
        both = self._call(aten.add.Tensor, tuple(apart), self.total, AFTER)
        self.total.replace_all_uses_with(both)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, when: str) -> fx.Node:
        with self.graph.inserting_before(self.total):
            node = self.graph.call_function(target, args)
        node.meta = dict(like.meta)
        self.moments.when[node] = when
        self.moments.stateful.add(node)
        return node
