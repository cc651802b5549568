"""`own_results`: gives every result of a step memory of its own. It cannot be left out.

    %9 = adam([%w], ...)                        %4 = clone(%w)
    return ([%w, %loss, %loss], [%9])     ->    %9 = adam([%w], ...)
                                                %5 = clone(%loss)
                                                return ([%4, %loss, %5], [%9])

A graph has values, not memory: `w.clone()` is the value `w`. Without a clone the next step would change the
caller's result, and a caller's write would change the weight. A clone is right behind its operand, so that
later ops may overwrite state in place. The pass runs again after passes that make views of computed values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.analysis.aliases import aliased, roots_of
from tutti.graph.edits.edit import NOTES

aten = torch.ops.aten


def own_results(graph: fx.Graph) -> int:
    """Clone results that share memory with an input, a constant, new state or another result; returns the
    number of clones."""
    output = graph.output_node()
    both: Any = output.args[0]
    returned, updates = both
    roots = roots_of(graph)
    taken = {roots[x] for x in updates if x in roots}
    own: list[Any] = []
    count = 0
    for x in returned:
        if isinstance(x, fx.Node) and x in roots:
            root = roots[x]
            if root in taken or root.op in ("placeholder", "get_attr"):
                x = _cloned(graph, x)
                count += 1
            taken.add(root)
        own.append(x)
    output.args = ((own, updates),)
    return count


def is_returned(x: fx.Node) -> bool:
    """Whether the output holds `x`, or a view of it."""
    return any(
        user.op == "output" or (aliased(user) is x and is_returned(user)) for user in x.users
    )


def _cloned(graph: fx.Graph, x: fx.Node) -> fx.Node:
    behind = x
    while behind.next.op == "placeholder":
        behind = behind.next
    assert isinstance(x.meta["val"], Tensor)
    with graph.inserting_after(behind):
        clone = graph.call_function(aten.clone.default, (x,))
    clone.meta = {**{k: x.meta[k] for k in NOTES if k in x.meta}, "val": x.meta["val"]}
    return clone
