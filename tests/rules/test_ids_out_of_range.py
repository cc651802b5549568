"""An id outside of its table is an error in every layout, as it is on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from small_steps import trained
from tutti.graph.ops.checked_ids import from_start, near

SIZE = 64  # large enough that a gather of all classes costs more than the sum of losses


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(SIZE, 4), nn.Linear(4, SIZE, bias=False)


def likelihood(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model.table(tokens)), targets)  # both


PLACES = {"table.weight": "tensor, -", "head.weight": "tensor, -"}


def batch(at: int, wrong: int) -> tuple[Tensor, Tensor]:
    given = torch.randint(SIZE, (2, 512), generator=torch.Generator().manual_seed(0))
    given[at, 1] = wrong
    return given[0], given[1]


def said(at: int, wrong: int) -> str:
    """What a call with a wrong id raises, after a call without."""
    torch.manual_seed(0)
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(trained(likelihood), model, optimizer, "tensor=2", place=PLACES)
    step(*batch(0, 1))
    before = step.state_dict()["table.weight"].to_local().clone()
    with pytest.raises(IndexError) as caught:
        step(*batch(at, wrong))
    assert torch.equal(step.state_dict()["table.weight"].to_local(), before)
    return f"{caught.type.__name__}: {caught.value} {caught.value.__notes__}"


@pytest.mark.parametrize(("at", "wrong"), [(0, SIZE), (0, -1), (1, SIZE), (1, -1)])
def test_ids_of_a_split_table_and_of_split_classes(at: int, wrong: int, ranks: Ranks) -> None:
    for found in ranks.run(said, at, wrong, n=2):
        assert f"IndexError: index {wrong} is out of bounds for a dim of size {SIZE}" in found
        assert "# both" in found


def test_an_ignored_class_may_be_any_number(ranks: Ranks) -> None:
    for layout in ("tensor=2", "data=2"):
        for losses in ranks.run(ignoring, layout, n=2):
            assert losses == ignoring("")


def ignoring(layout: str) -> list[float]:
    torch.manual_seed(0)
    model = Bigram().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = PLACES if "tensor" in layout else None
    step = tutti.distribute(trained(likelihood), model, optimizer, layout or None, place=place)
    return [round(float(step(*batch(1, -100))), 10) for _ in range(2)]


def test_rows_of_other_ranks_may_hold_nan(ranks: Ranks) -> None:
    """A row that no token reads does not enter."""
    for losses in ranks.run(with_nan, "tensor=2", n=2):
        assert losses == with_nan("")


def with_nan(layout: str) -> list[float]:
    torch.manual_seed(0)
    model = Bigram().double()
    with torch.no_grad():
        model.table.weight[SIZE // 2 - 1 :: SIZE // 2] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = {"table.weight": "tensor, -"} if layout else None
    step = tutti.distribute(trained(looked_up), model, optimizer, layout or None, place=place)
    tokens = torch.tensor([0, 7, 3, 8])
    return [round(float(step(tokens)), 10) for _ in range(2)]


def looked_up(model: Any, tokens: Tensor) -> Tensor:
    return model.head(model.table(tokens)).square().mean()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("function", [from_start, near])
def test_ids(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 5], [3, 2]], dtype=dtype).t()
    if function is from_start:
        torch.testing.assert_close(from_start(ids - 3, 6, True), (ids.long() - 3) % 6)
        assert from_start(ids, 6, False) is not ids
        return
    rows = torch.tensor([2, 3])
    torch.testing.assert_close(near(rows, ids, 6, None), torch.tensor([[0, 1], [1, 0]]))
    near(rows, ids + 100, None, None)
    near(rows, torch.full_like(ids, -7), 6, -7)
    with pytest.raises(IndexError, match="index 6 is out"):
        near(rows, ids + 1, 6, -7)
