"""An op's error names the user's line, whose frame a traceback of generated code lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from gradient_programs import small_model
from small_steps import trained


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.table.weight)  # the lookup
        return rows.square().mean()


@pytest.mark.parametrize("micro", ["", "micro=2"])
def test_an_index_out_of_range(micro: str) -> None:
    model = Lookup()
    plain: Any = trained(lambda model, x: model(x))
    step = tutti.distribute(plain, model, torch.optim.SGD(model.parameters(), lr=0.1), micro)
    step(torch.tensor([0, 5, 3, 1]))
    with pytest.raises(IndexError) as caught:
        step(torch.tensor([0, 6, 3, 1]))
    (note,) = caught.value.__notes__
    assert __file__ in note and note.endswith("# the lookup")


def test_a_division_by_a_number_that_is_read() -> None:
    def step(model: Any, x: Tensor) -> Any:
        total = model(x).sum()
        count = (x > 9).sum().item()
        return total, (1 / count if count < 3 else 0.0)  # the division

    with pytest.raises(ZeroDivisionError) as caught:
        tutti.distribute(step, small_model(), None, "")(torch.zeros(4, 6))
    (note,) = caught.value.__notes__
    assert __file__ in note and note.endswith("# the division")
