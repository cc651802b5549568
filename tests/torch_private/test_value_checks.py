"""Contracts of `torch_private/value_checks.py`."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from tutti.torch_private.value_checks import (
    CHECK_OF_ARGUMENTS,
    CHECK_OF_CAUSAL_MASKS,
    CHECK_OF_VALUES,
)


def test_a_distribution_takes_any_values_where_it_does_not_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*CHECK_OF_ARGUMENTS, True)  # `torch.compile` leaves it off
    with mock.patch.object(*CHECK_OF_ARGUMENTS, False):
        Normal(0.0, torch.tensor(-1.0))
    with pytest.raises(ValueError, match="constraint"):
        Normal(0.0, torch.tensor(-1.0))


def test_a_transformer_asks_one_function_whether_its_mask_is_causal() -> None:
    asked = []

    def found(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        asked.append((mask, is_causal, size))
        return False

    layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    with mock.patch.object(*CHECK_OF_CAUSAL_MASKS, found):
        encoder(torch.zeros(1, 3, 4), mask=mask)
    assert len(asked) == 1 and asked[0][1] is None


def test_a_check_of_all_values_is_one_function() -> None:
    asked = []
    with mock.patch.object(*CHECK_OF_VALUES, lambda *given: asked.append(given)):
        torch._check_tensor_all(torch.tensor([False]))
    assert len(asked) == 1
    with pytest.raises(RuntimeError):
        torch._check_tensor_all(torch.tensor([False]))
