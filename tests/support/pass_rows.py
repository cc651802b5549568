"""One row of the table of passes, replaced for a test."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tutti.passes import pass_table


def replace_row(monkeypatch: pytest.MonkeyPatch, name: str, **columns: Any) -> None:
    """Let the pass `name` have other `columns` in the table."""
    assert name in pass_table.optional_names()
    rows = (
        dataclasses.replace(row, **columns) if row.name == name else row
        for row in pass_table.PASSES
    )
    monkeypatch.setattr(pass_table, "PASSES", tuple(rows))
