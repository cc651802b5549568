"""Products by expert and moves of rows, against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.graph.ops.expert_rows import (
    cut_slots,
    expert_mm,
    expert_outer,
    expert_slots,
    fill_slots,
    from_experts,
    to_experts,
)

ROWS, EXPERTS, IN, OUT = 24, 6, 5, 3


def numbers(seed: int, low: int = 0, high: int = EXPERTS) -> Tensor:
    return torch.randint(low, high, (ROWS,), generator=torch.Generator().manual_seed(seed))


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("groups", [1, 3])
def test_each_row_meets_its_own_weights(transposed: bool, low: int, groups: int) -> None:
    of_group = EXPERTS // groups
    x, experts = floats(0, ROWS, IN), numbers(1, low, of_group)
    weight = floats(2, EXPERTS, *((IN, OUT) if transposed else (OUT, IN)))
    made = expert_mm(x, weight, experts, transposed, groups, groups)
    for row, e in enumerate(experts.tolist()):
        w = weight[row // (ROWS // groups) * of_group + e]
        want = x[row] @ (w if transposed else w.t()) if e >= 0 else torch.zeros(OUT).double()
        torch.testing.assert_close(made[row], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_rows_of_one_expert_add_up(low: int, groups: int) -> None:
    of_group = EXPERTS // groups
    a, b, experts = floats(0, ROWS, OUT), floats(1, ROWS, IN), numbers(2, low, of_group)
    made = expert_outer(a, b, experts, [EXPERTS, OUT, IN], groups, groups)
    want = torch.zeros(EXPERTS, OUT, IN, dtype=torch.float64)
    for row, e in enumerate(experts.tolist()):
        if e >= 0:
            want[row // (ROWS // groups) * of_group + e] += torch.outer(a[row], b[row])
    torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


def test_all_rows_of_one_expert_and_none() -> None:
    x, weight = floats(0, ROWS, IN), floats(1, EXPERTS, OUT, IN)
    one = expert_mm(x, weight, torch.full((ROWS,), 4), False, 1, 1)
    torch.testing.assert_close(one, x @ weight[4].t())
    none = torch.full((ROWS,), -1)
    assert not expert_mm(x, weight, none, False, 1, 1).any()
    assert not expert_outer(x, x, none, [EXPERTS, IN, IN], 1, 1).any()


def test_an_expert_that_does_not_exist_is_refused() -> None:
    x, weight = floats(0, ROWS, IN), floats(1, EXPERTS, OUT, IN)
    with pytest.raises(IndexError, match="has the number 6"):
        expert_mm(x, weight, torch.full((ROWS,), EXPERTS), False, 1, 1)


@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize(("groups", "room"), [(1, 24), (2, 12), (3, 6), (6, 4)])
def test_rows_come_back_from_the_slots_of_their_experts(low: int, groups: int, room: int) -> None:
    x, experts = floats(0, ROWS, IN), numbers(1, low)
    slots = to_experts(x, experts, EXPERTS, groups, room)
    assert slots.shape == (groups, ROWS // room, room, IN)
    back = from_experts(slots, experts, EXPERTS, groups)
    assert torch.equal(back, torch.where(experts[:, None] < 0, 0.0, x))


@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("room", [24, 6])
def test_a_slot_holds_a_row_of_its_group_and_block(low: int, room: int) -> None:
    experts = numbers(1, low)
    rows = torch.arange(1, ROWS + 1, dtype=torch.float64)[:, None]
    slots = to_experts(rows, experts, EXPERTS, 3, room)[..., 0]
    kinds = expert_slots(experts, EXPERTS, 3, room)
    assert int((slots > 0).sum()) == int((experts >= 0).sum())
    for group, block, place in (slots > 0).nonzero().tolist():
        row = int(slots[group, block, place]) - 1
        assert row // room == block
        assert group * 2 + int(kinds[group, block, place]) == int(experts[row])
    assert torch.equal(kinds >= 0, slots > 0)


def test_a_product_on_slots_is_the_product_of_the_rows() -> None:
    x, weight, experts = floats(0, ROWS, IN), floats(1, EXPERTS, OUT, IN), numbers(2, -1)
    flat = to_experts(x, experts, EXPERTS, 3, 6).reshape(-1, IN)
    kinds = expert_slots(experts, EXPERTS, 3, 6).flatten()
    made = expert_mm(flat, weight, kinds, False, 3, 3).reshape(3, 4, 6, OUT)
    have = from_experts(made, experts, EXPERTS, 3)
    torch.testing.assert_close(have, expert_mm(x, weight, experts, False, 1, 1))


@pytest.mark.parametrize(("fullest", "size"), [(5, 5), (0, 1), (6, 6)])
def test_only_filled_slots_move(fullest: int, size: int) -> None:
    """At least one slot, since collectives do not move nothing; others come back as the filler."""
    slots = floats(0, 3, 4, 6, IN)
    slots[:, :, fullest:] = -1.0
    cut = cut_slots(slots, torch.tensor(fullest), 3)
    assert cut.shape == (3, 4, size, IN) and cut.is_contiguous()
    assert cut.data_ptr() != slots.data_ptr()
    assert torch.equal(fill_slots(cut, 6, -1), slots)
