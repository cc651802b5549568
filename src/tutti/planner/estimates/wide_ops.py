"""What a step computes in a wider dtype than its precision says: ops that `torch.autocast` does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from tutti.graph.analysis.cost import flops_of
from tutti.graph.edits.edit import source_of
from tutti.graph.text import op_name
from tutti.torch_private.pytrees import tree_leaves


class WideOp(NamedTuple):
    """An op at a line of the user; `share` of all operations of the step, and the dtype in which it stays."""

    name: str
    source: str
    share: float
    dtype: str


def widest_op(nodes: Iterable[fx.Node], dtype: torch.dtype) -> WideOp | None:
    """The op and line with most operations in `dtype`, a backward counted at the line of its forward."""
    found: Counter[tuple[str, str]] = Counter()
    total = 0.0
    for node in nodes:
        flops = flops_of(node)
        made = next((x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)), None)
        total += flops
        if flops and made is not None and made.dtype == dtype:
            found[op_name(node), source_of(node)] += flops  # type: ignore[assignment]
    if not found:
        return None
    name, source = max(found, key=lambda key: found[key])
    return WideOp(name, source, found[name, source] / total, str(dtype).removeprefix("torch."))
