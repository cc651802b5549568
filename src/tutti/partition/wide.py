"""Sums over ranks of half-precision values, in float32.

    %3: bf16[8, 32]{partial tensor}        %3: bf16[8, 32]{partial tensor}
    %4: bf16[8, 32] = all_reduce(%3)  ->   %4: f32[8, 32]{partial tensor} = _to_copy(%3, dtype=f32)
                                           %5: f32[8, 32] = all_reduce(%4)
                                           %6: bf16[8, 32] = _to_copy(%5, dtype=bf16)

One device rounds such a sum once; ranks that add in half precision would round at every addition. The price
is twice the bytes. Other moves (a maximum, a gather) keep the dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.partition.localize import Local
from tutti.partition.reshard import RouteStep

aten = torch.ops.aten
_ADDS = ("sum", "prod")


class Mover:
    """Writes the steps of one route for `user`; between two reductions the value stays wide."""

    def __init__(self, local: Local, value: fx.Node, user: fx.Node) -> None:
        self.local, self.value, self.user = local, value, user
        self.dtype: torch.dtype = value.meta["val"].dtype
        self.wide: fx.Node | None = None

    def move(self, node: fx.Node, step: RouteStep) -> fx.Node:
        """The value after `step`, in its own dtype."""
        if not self._adds(step):
            self.wide = None
            return self._collective(node, step, self.dtype)
        wide = self.wide or self._cast(node, torch.float32)
        self.wide = self._collective(wide, step, torch.float32)
        return self._cast(self.wide, self.dtype)

    def _adds(self, step: RouteStep) -> bool:
        half = self.dtype in (torch.bfloat16, torch.float16)
        reduces = step.kind in ("all_reduce", "reduce_scatter")
        return half and reduces and step.arguments[-1] in _ADDS

    def _collective(self, node: fx.Node, step: RouteStep, dtype: torch.dtype) -> fx.Node:
        like: Tensor = self.value.meta["val"]
        val = self.local.empty(like, step.result, dtype=dtype)
        function: Any = getattr(collectives, step.kind)
        made = self.local.call(function, (node, *step.arguments), {}, self.user, val)
        made.meta |= {"sharding": step.result, "value": self.value, "user": self.user}
        return made

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        made = self.local.call(aten._to_copy.default, (node,), {"dtype": dtype}, self.user)
        made.meta["sharding"] = node.meta["sharding"]
        return made
