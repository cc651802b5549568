"""Sample calls of the products and moves of rows by expert; a number below 0 is no expert."""

from __future__ import annotations

from typing import Any

from tutti.graph.ops.expert_rows import (
    expert_mm,
    expert_outer,
    expert_slots,
    from_experts,
    to_experts,
)
from tutti.rules.samples.sample import Sample, f, ints, some


def _call(op: Any, *args: Any) -> Sample:
    return Sample(op, args)


_FLAT = [
    _call(expert_mm, f(12, 4), f(12, 6, 4), ints(12, 12), False, 1, 1),
    _call(expert_mm, f(12, 4), f(8, 4, 6), some(8, -1, 12), True, 1, 1),
    _call(expert_mm, f(12, 1), f(12, 6, 1), ints(2, 12), False, 1, 1),
    _call(expert_outer, f(12, 6), f(12, 4), ints(12, 12), [12, 6, 4], 1, 1),
    _call(expert_outer, f(12, 6), f(12, 4), some(4, -1, 12), [12, 6, 4], 1, 1),
]
# Slots of four groups, of two experts each.
_GROUPED = [
    _call(expert_mm, f(48, 4), f(8, 6, 4), some(2, -1, 48), False, 4, 4),
    _call(expert_mm, f(16, 6), f(8, 6, 4), some(2, -1, 16), True, 4, 4),
    _call(expert_outer, f(48, 6), f(48, 4), some(2, -1, 48), [8, 6, 4], 4, 4),
]
_MOVES = [
    _call(to_experts, f(24, 4), ints(8, 24), 8, 4, 6),
    _call(to_experts, f(24), some(12, -1, 24), 12, 12, 2),
    _call(expert_slots, ints(8, 24), 8, 4, 6),
    _call(expert_slots, some(12, -1, 24), 12, 12, 2),
    _call(from_experts, f(4, 4, 6, 4), ints(8, 24), 8, 4),
    _call(from_experts, f(12, 12, 2), some(12, -1, 24), 12, 12),
]
EXPERTS = [*_FLAT, *_GROUPED, *_MOVES]
