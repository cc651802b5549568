"""Sums over ranks of half-precision values, in float32.

    %3: bf16[8, 32]{partial tensor}        %3: bf16[8, 32]{partial tensor}
    %4: bf16[8, 32] = all_reduce(%3)  ->   %4: f32[8, 32]{partial tensor} = _to_copy(%3, dtype=f32)
                                           %5: f32[8, 32] = all_reduce(%4)
                                           %6: bf16[8, 32] = _to_copy(%5, dtype=bf16)

One device rounds such a sum once; ranks that add in half precision would round at every addition. The price
is twice the bytes. Other moves (a maximum, a gather) keep the dtype.

An all-to-all of slots of experts (`graph.ops.expert_rows`) moves the filled ones:

    %6: i64[] = all_reduce(%5, expert, max)        the most slots that a block fills on a rank
    %7: f32[2, 2@expert, 16, 16] = cut_slots(%4, %6)
    %8: f32[2@expert, 2, 16, 16] = all_to_all(%7)
    %9: f32[2@expert, 2, 32, 16] = fill_slots(%8)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import MOVES_SLOTS, cut_slots, fill_slots
from tutti.layout import Segment, Sharding
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
        experts = self.local.slots.get(self.value)
        if experts is not None and step.kind == "all_to_all":
            return self._exchanged(node, step, experts)
        if not self._adds(step):
            self.wide = None
            return self._collective(node, step, self.dtype)
        wide = self.wide or self._cast(node, torch.float32)
        self.wide = self._collective(wide, step, torch.float32)
        return self._cast(self.wide, self.dtype)

    def _exchanged(self, node: fx.Node, step: RouteStep, experts: fx.Node) -> fx.Node:
        """An all-to-all of slots: only the filled ones move, as many of each block."""
        num = self.local.num_slots.get(experts)
        if num is None and self.value is experts:
            num = self.local.num_slots[experts] = self._fullest(node, step)
        if num is None:
            return self._collective(node, step, self.dtype)
        axes: Any = step.arguments[0]
        share = self.local.mesh.size(axes)
        cut = self.local.call(cut_slots, (node, num, share), {}, self.user)
        room, width = (int(x.meta["val"].shape[2]) for x in (node, cut))
        lead, rest = step.result.dims[:2], step.result.dims[3:]
        narrow = replace(step, result=Sharding((*lead, (Segment(width),), *rest)))
        moved = self._collective(cut, narrow, self.dtype)
        moved.meta[MOVES_SLOTS] = True
        filler = -1 if self.value is experts else 0
        made = self.local.call(fill_slots, (moved, room, filler), {}, self.user)
        made.meta["sharding"] = step.result
        return made

    def _fullest(self, experts: fx.Node, step: RouteStep) -> fx.Node:
        """The most slots that a block fills on any rank of the group; int64, no dims."""
        filled = self.local.call(aten.ge.Scalar, (experts, 0), {}, self.user)
        each = self.local.call(aten.sum.dim_IntList, (filled, [2]), {}, self.user)
        own = self.local.call(aten.amax.default, (each,), {}, self.user)
        args = (own, step.arguments[0], "max")
        made = self.local.call(collectives.all_reduce, args, {}, self.user, own.meta["val"])
        made.meta |= {"sharding": Sharding(()), "value": self.value, "user": self.user}
        return made

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
