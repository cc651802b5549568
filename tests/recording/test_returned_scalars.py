"""The loss is found in whatever a step returns, and in a result of another form again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tutti.recording.returned_scalars import MOST_SCALARS, ReturnedScalars

LOSS, ACCURACY, LOGITS = torch.tensor(2.5), torch.tensor([0.25]), torch.ones(3, 4)
Pair = namedtuple("Pair", ["logits", "loss"])


@dataclass
class Output:
    """As of a model of one's own."""

    logits: Tensor
    loss: Tensor


CASES = [
    (LOSS, {"loss": 2.5}),
    (2.5, {"loss": 2.5}),
    ((LOGITS, LOSS), {"value 1": 2.5}),
    ({"accuracy": ACCURACY, "loss": LOSS, "logits": LOGITS}, {"loss": 2.5, "accuracy": 0.25}),
    ({"a": {"b": {"my_loss": LOSS}}}, {"a.b.my_loss": 2.5}),
    (Pair(LOGITS, LOSS), {"loss": 2.5}),
    (Output(LOGITS, LOSS), {"loss": 2.5}),
    (OrderedDict(loss=LOSS, logits=LOGITS), {"loss": 2.5}),
    ([{"x": LOSS}, {"x": ACCURACY}], {"value 0.x": 2.5, "value 1.x": 0.25}),
    (None, {}),
    (LOGITS, {}),
    ({"text": "abc", "count": 3, "flag": True, "steps": torch.tensor(4)}, {}),
    ((), {}),
]


@pytest.mark.parametrize(("result", "expected"), CASES, ids=range(len(CASES)))
def test_scalars_have_names(result: Any, expected: dict[str, float]) -> None:
    scalars = ReturnedScalars()
    for _ in range(2):
        found = [float(x) for x in scalars.of(result)]
        assert dict(zip(scalars.names, found, strict=True)) == expected
        assert list(scalars.names) == list(expected)


def test_a_result_of_another_form_is_searched_again() -> None:
    told, silent = ReturnedScalars(), ReturnedScalars()
    for result, expected in CASES * 2:
        told.forget()
        assert [float(x) for x in told.of(result)] == list(expected.values())
    for result, expected in [(r, e) for r, e in CASES * 2 if e]:
        assert [float(x) for x in silent.of(result)] == list(expected.values())


def test_no_more_than_the_first_scalars() -> None:
    scalars = ReturnedScalars()
    assert (
        len(scalars.of({f"metric {k}": LOSS for k in range(50)} | {"loss": LOSS})) == MOST_SCALARS
    )
    assert scalars.names[0] == "loss"


def test_a_container_that_contains_itself_ends() -> None:
    endless: list[Any] = [LOSS]
    endless.append(endless)
    scalars = ReturnedScalars()
    assert scalars.of(endless)[0] is LOSS
