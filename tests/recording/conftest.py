"""Runs say what they measure, as by default."""

from __future__ import annotations

import pytest

from tutti.environment import PREDICTION


@pytest.fixture(autouse=True)
def default_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have it off."""
    monkeypatch.delenv(PREDICTION.name)
