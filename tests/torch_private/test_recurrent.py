"""Contracts of `torch_private/recurrent.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutti.torch_private.recurrent import ENTRIES

CALLERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
    "lstm_cell": nn.LSTMCell,
    "gru_cell": nn.GRUCell,
}


@pytest.mark.parametrize("name", CALLERS)
def test_layers_call_this_entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    kernel = getattr(ENTRIES, name)

    def noted(*args: Any) -> Any:
        called.append(args)
        return kernel(*args)

    monkeypatch.setattr(ENTRIES, name, noted, raising=False)
    shape = (3, 5) if name.endswith("cell") else (4, 3, 5)
    CALLERS[name](5, 6)(torch.randn(shape))
    assert len(called) == 1
