"""Metrics are numbers of their step, whatever becomes of the tensors that held them."""

from __future__ import annotations

import math

import torch

from tutti.resuming.history import History


def test_columns_have_a_number_for_each_step() -> None:
    history = History()
    loss = torch.tensor(0.5)
    history.add(1, {"loss": loss})
    loss.fill_(9.0)  # a step may write its results into the same memory
    history.add(2, {"loss": torch.tensor([[0.25]]), "lr": 3})
    history.add(3, {"score": True})
    found = history.columns()
    assert found["step"] == [1, 2, 3] and found["loss"][:2] == [0.5, 0.25]
    assert math.isnan(found["loss"][2]) and found["lr"][1] == 3.0
    assert [math.isnan(x) for x in found["score"]] == [True, True, False]
    assert history.latest(0) == {"loss": 0.25, "lr": 3.0, "score": 1.0}
    assert history.latest(2) == {"score": 1.0}


def test_values_of_other_devices_wait_for_the_next_look() -> None:
    """A tensor that counts its reads stands for one on a GPU."""
    history = History()
    history.add(1, {"loss": 1.0, "other": 2.0})
    for step in range(2, 5):
        history.add(step, {"loss": 0.0, "other": 0.0})
        history._waiting.append(("loss", step - 1, torch.tensor(float(step))))
    assert len(history._waiting) == 3
    assert history.columns()["loss"] == [1.0, 2.0, 3.0, 4.0] and not history._waiting
    assert history.columns()["other"] == [2.0, 0.0, 0.0, 0.0]


def test_a_saved_history_goes_on() -> None:
    history, again = History(), History()
    for step in range(1, 4):
        history.add(step, {"loss": 1.0 / step})
    again.load(history.state())
    assert again.columns() == history.columns()
    again.add(4, {"loss": 0.1})
    assert again.columns()["loss"] == [1.0, 0.5, 1.0 / 3, 0.1]


def test_a_metric_from_half_precision() -> None:
    history = History()
    history.add(1, {"loss": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)})
    assert history.columns()["loss"] == [0.5]
