"""Products of rows with the weights of their experts, and the moves of rows between experts.

    tutti::expert_mm(x, weight, experts, transposed, groups, padding) -> y
    tutti::expert_outer(a, b, experts, shape, groups, padding) -> gradient of the weights
    tutti::to_experts(x, experts, num_experts, groups, room) -> slots
    tutti::expert_slots(experts, num_experts, groups, room) -> the expert of each slot
    tutti::from_experts(slots, experts, num_experts, groups) -> x

A row s of `x` (S, K) is multiplied with weight[experts[s]] (N, K), or (K, N) if `transposed`: y is (S, N).
`expert_outer` sums a[s] b[s]^T of (S, N) and (S, K) by expert, (E, N, K). An expert below 0 is none: its row
of y is zeros, and it adds nothing.

    experts 0 1 | 2 3            two groups of two
    rows    2 0 3 1 | 0 0 1 3    two blocks of four rows, as two ranks hold them; room 4

    slots   group 0   block 0: rows 1 3 . .    block 1: rows 4 5 6 .       (groups, blocks, room, K)
            group 1   block 0: rows 0 2 . .    block 1: row  7 . . .

`to_experts` moves each row to a free slot of its block among those of its expert's group, and `from_experts`
back. A block has `room` rows, and each group as many slots for it, so every row finds one; slots without a
row are zeros. So a mesh axis that splits the groups, and the experts, can hold the slots: moving the axis
from the blocks to the groups is one all-to-all.

    tutti::cut_slots(slots, num, share) -> the first `num` slots of each block
    tutti::fill_slots(cut, room, filler) -> all slots again
    tutti::to_filled(x, experts, num_experts, groups, room, num, share) -> both: the cut slots of to_experts

A block fills its slots of a group from the front. So an all-to-all between the first two moves as many slots
of each block as the fullest one has, which ranks agree on: a size of the call, and at most `room`. The fake
value of the cut slots has one of `share` slots, as many as are filled if experts are chosen evenly: costs and
predicted memory read it. `from_experts` takes cut slots, too.

With `groups` above 1 the rows of a product are those slots, flattened, and `experts` counts within a group.
`padding` is the number of slots for each row: it tells costs, not values.

Source: T. Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022 (no token is
dropped).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("tutti", "FRAGMENT")
_LIBRARY.define(
    "expert_mm(Tensor x, Tensor weight, Tensor experts, bool transposed, int groups, int padding) -> Tensor"
)
_LIBRARY.define(
    "expert_outer(Tensor a, Tensor b, Tensor experts, int[] shape, int groups, int padding) -> Tensor"
)
_LIBRARY.define(
    "to_experts(Tensor x, Tensor experts, int num_experts, int groups, int room) -> Tensor"
)
_LIBRARY.define("expert_slots(Tensor experts, int num_experts, int groups, int room) -> Tensor")
_LIBRARY.define("from_experts(Tensor slots, Tensor experts, int num_experts, int groups) -> Tensor")
_LIBRARY.define("cut_slots(Tensor slots, Tensor num, int share) -> Tensor")
_LIBRARY.define("fill_slots(Tensor cut, int room, int filler) -> Tensor")
_LIBRARY.define(
    "to_filled(Tensor x, Tensor experts, int num_experts, int groups, int room, Tensor num, int share)"
    " -> Tensor"
)
_ROOM = 2  # the dim of the slots of a block


def _sorted_rows(experts: Tensor, num_experts: int, groups: int) -> tuple[Tensor, list[int]]:
    """The rows with an expert, sorted by it, and the number of rows of each expert."""
    of_group = num_experts // groups
    within = experts.reshape(groups, experts.numel() // groups)
    if experts.numel() and not bool((experts < of_group).all()):
        raise IndexError(f"an expert out of {of_group} has the number {int(experts.max())}")
    first = torch.arange(groups, device=experts.device)[:, None] * of_group
    every = torch.where(within < 0, num_experts, within + first).flatten()
    counts: list[int] = torch.bincount(every, minlength=num_experts + 1)[:num_experts].tolist()
    return torch.argsort(every, stable=True)[: sum(counts)], counts


def _expert_mm(
    x: Tensor, weight: Tensor, experts: Tensor, transposed: bool, groups: int, padding: int
) -> Tensor:
    rows, counts = _sorted_rows(experts, weight.shape[0], groups)
    made = _fake_mm(x, weight, experts, transposed, groups, padding).zero_()
    if rows.numel():
        parts = x[rows].split(counts)
        products = [
            part @ (w if transposed else w.t())
            for part, w in zip(parts, weight, strict=True)
            if part.shape[0]
        ]
        made[rows] = torch.cat(products)
    return made


def _expert_outer(
    a: Tensor, b: Tensor, experts: Tensor, shape: Sequence[int], groups: int, padding: int
) -> Tensor:
    rows, counts = _sorted_rows(experts, shape[0], groups)
    made = _fake_outer(a, b, experts, shape, groups, padding).zero_()
    pairs = zip(a[rows].split(counts), b[rows].split(counts), made, strict=True)
    for left, right, out in pairs:
        if left.shape[0]:
            torch.mm(left.t(), right, out=out)
    return made


def _slot_of(experts: Tensor, num_experts: int, groups: int, room: int, width: int) -> Tensor:
    """The slot of each row among all groups * blocks * width, -1 for a row without an expert.

    A block has `room` rows, and `width` slots for them in each group.
    """
    blocks = experts.numel() // room
    group = torch.div(experts, num_experts // groups, rounding_mode="floor")
    group = torch.where(experts < 0, -1, group).reshape(blocks, room)
    mine = group[:, :, None] == torch.arange(groups, device=experts.device)
    taken = mine.cumsum(1) - 1  # the rows before it of the same block and group
    place = taken.gather(2, group.clamp(min=0)[:, :, None])[:, :, 0]
    block = torch.arange(blocks, device=experts.device)[:, None]
    slot = (group * blocks + block) * width + place
    return torch.where(group < 0, -1, slot).flatten()


def _placed(x: Tensor, slot: Tensor, num_slots: int, empty: int) -> Tensor:
    """The rows of `x` at their slots, `empty` elsewhere; one slot more takes the rows without one."""
    made = x.new_full((num_slots + 1, *x.shape[1:]), empty)
    made[torch.where(slot < 0, num_slots, slot)] = x
    return made[:num_slots]


def _to_experts(x: Tensor, experts: Tensor, num_experts: int, groups: int, room: int) -> Tensor:
    slot = _slot_of(experts, num_experts, groups, room, room)
    made = _fake_to(x, experts, num_experts, groups, room)
    return _placed(x, slot, groups * x.shape[0], 0).reshape(made.shape)


def _expert_slots(experts: Tensor, num_experts: int, groups: int, room: int) -> Tensor:
    slot = _slot_of(experts, num_experts, groups, room, room)
    within = torch.remainder(experts, num_experts // groups)
    made = _fake_slots(experts, num_experts, groups, room)
    return _placed(within, slot, groups * experts.shape[0], -1).reshape(made.shape)


def _from_experts(slots: Tensor, experts: Tensor, num_experts: int, groups: int) -> Tensor:
    room = experts.numel() // max(1, slots.shape[1])
    slot = _slot_of(experts, num_experts, groups, room, slots.shape[_ROOM])
    flat = slots.reshape(-1, *slots.shape[3:])
    found = flat[slot.clamp(min=0)]
    none = (slot < 0).reshape(-1, *[1] * (found.ndim - 1))
    return found.masked_fill(none, 0)


def _to_filled(
    x: Tensor, experts: Tensor, num_experts: int, groups: int, room: int, num: Tensor, share: int
) -> Tensor:
    width, blocks = _width(num), x.shape[0] // room
    slot = _slot_of(experts, num_experts, groups, room, width)
    made = _placed(x, slot, groups * blocks * width, 0)
    return made.reshape(groups, blocks, width, *x.shape[1:])


def _width(num: Tensor) -> int:
    return max(1, int(num))


def _cut_slots(slots: Tensor, num: Tensor, share: int) -> Tensor:
    return slots.narrow(_ROOM, 0, _width(num)).clone(memory_format=torch.contiguous_format)


def _fill_slots(cut: Tensor, room: int, filler: int) -> Tensor:
    made = cut.new_full((*cut.shape[:_ROOM], room, *cut.shape[_ROOM + 1 :]), filler)
    made.narrow(_ROOM, 0, cut.shape[_ROOM]).copy_(cut)
    return made


def _fake_mm(
    x: Tensor, weight: Tensor, experts: Tensor, transposed: bool, groups: int, padding: int
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))


def _fake_outer(
    a: Tensor, b: Tensor, experts: Tensor, shape: Sequence[int], groups: int, padding: int
) -> Tensor:
    return a.new_empty(tuple(shape))


def _fake_to(x: Tensor, experts: Tensor, num_experts: int, groups: int, room: int) -> Tensor:
    return x.new_empty((groups, x.shape[0] // room, room, *x.shape[1:]))


def _fake_slots(experts: Tensor, num_experts: int, groups: int, room: int) -> Tensor:
    return experts.new_empty((groups, experts.shape[0] // room, room))


def _fake_from(slots: Tensor, experts: Tensor, num_experts: int, groups: int) -> Tensor:
    return slots.new_empty((experts.shape[0], *slots.shape[3:]))


def _fake_cut(slots: Tensor, num: Tensor, share: int) -> Tensor:
    return slots.new_empty(_with_width(slots.shape, filled(slots.shape[_ROOM], share)))


def _fake_fill(cut: Tensor, room: int, filler: int) -> Tensor:
    return cut.new_empty(_with_width(cut.shape, room))


def _fake_filled(
    x: Tensor, experts: Tensor, num_experts: int, groups: int, room: int, num: Tensor, share: int
) -> Tensor:
    whole = _fake_to(x, experts, num_experts, groups, room)
    return _fake_cut(whole, num, share)


def filled(room: int, share: int) -> int:
    """The slots of a block that are filled, of `room`, if one of `share` is."""
    return -(-room // share)


def for_random_values(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an op, for a run on values that are not those of a step.

    Rows may all go to one group: a block has all of its slots. An expert that is alone in its group gets all
    rows. Nodes are arguments whose values are as they are.
    """
    args: list[Any] = list(node.args)
    if node.target is cut_slots:
        args[1] = torch.tensor(args[0].meta["val"].shape[_ROOM])
    elif node.target is to_filled:
        args[5] = torch.tensor(args[4])
    elif node.target is from_experts:
        slots = args[0].meta["val"]
        room = args[1].meta["val"].numel() // max(1, slots.shape[1])
        if slots.shape[_ROOM] < room:
            args[0] = torch.zeros(_with_width(slots.shape, room), dtype=slots.dtype)
    elif node.target in PRODUCTS:
        experts, groups = args[2].meta["val"], args[-2]
        of_weight = args[3] if node.target is expert_outer else args[1].meta["val"].shape
        if of_weight[0] == groups:
            args[2] = torch.zeros(tuple(experts.shape), dtype=experts.dtype)
    return tuple(args)


def _with_width(shape: Sequence[int], width: int) -> tuple[int, ...]:
    return (*shape[:_ROOM], width, *shape[_ROOM + 1 :])


for _name, _kernel, _fake in (
    ("expert_mm", _expert_mm, _fake_mm),
    ("expert_outer", _expert_outer, _fake_outer),
    ("to_experts", _to_experts, _fake_to),
    ("expert_slots", _expert_slots, _fake_slots),
    ("from_experts", _from_experts, _fake_from),
    ("cut_slots", _cut_slots, _fake_cut),
    ("fill_slots", _fill_slots, _fake_fill),
    ("to_filled", _to_filled, _fake_filled),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tutti::{_name}", _fake, lib=_LIBRARY)

expert_mm = torch.ops.tutti.expert_mm.default
expert_outer = torch.ops.tutti.expert_outer.default
to_experts = torch.ops.tutti.to_experts.default
expert_slots = torch.ops.tutti.expert_slots.default
from_experts = torch.ops.tutti.from_experts.default
cut_slots = torch.ops.tutti.cut_slots.default
fill_slots = torch.ops.tutti.fill_slots.default
to_filled = torch.ops.tutti.to_filled.default
PRODUCTS = (expert_mm, expert_outer)
# The note of an all-to-all that moves slots.
MOVES_SLOTS = "moves_slots"
