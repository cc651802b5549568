"""Values on a device are read once its work is done, in the order of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutti.recording import late_values
from tutti.recording.late_values import LateValues


class Device:
    """A mock of a GPU: tensors of float16 are its, and its work is done when told."""

    done = False

    def query(self) -> bool:
        """Whether the copy is there."""
        return self.done

    def synchronize(self) -> None:
        """Wait for it."""
        self.done = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, begun = Device(), late_values._begun
    monkeypatch.setattr(
        late_values, "_is_far", lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.float16
    )

    def on_device(rows: list[Any]) -> Any:
        copy = begun(rows)
        copy.done = made
        return copy

    monkeypatch.setattr(late_values, "_begun", on_device)
    return made


def near(*numbers: float) -> list[tuple[Any, ...]]:
    return [(k, torch.tensor(x)) for k, x in enumerate(numbers)]


def far(*numbers: float) -> list[tuple[Any, ...]]:
    return [(k, torch.tensor(x, dtype=torch.float16)) for k, x in enumerate(numbers)]


def test_values_of_the_host_are_known_at_once() -> None:
    assert LateValues().read([(1, 2.0, torch.tensor(3.5)), (2, 4.0, torch.tensor([5.5]))]) == [
        [1, 2.0, 3.5],
        [2, 4.0, 5.5],
    ]


def test_values_of_a_device_wait_and_keep_their_order(device: Device) -> None:
    values = LateValues()
    assert values.read(far(1.0, 2.0)) == []
    assert values.read(near(3.0)) == []  # a later step, known earlier
    assert values.read([]) == []
    device.done = True
    assert [row[1] for row in values.read(far(4.0))] == [1.0, 2.0, 3.0, 4.0]


def test_the_end_of_a_run_waits(device: Device) -> None:
    values = LateValues()
    assert values.read(far(1.0)) == []
    assert [row[1] for row in values.read(far(2.0), wait=True)] == [1.0, 2.0]
    assert device.done and values.read([], wait=True) == []
