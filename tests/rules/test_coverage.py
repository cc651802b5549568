"""`docs/rules.md` is what the rules say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.rules.coverage import COMMAND, VERSION, table

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


@pytest.mark.skipif(
    f"PyTorch {VERSION}" not in PAGE.read_text(), reason="written with another PyTorch"
)
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == table(), f"run: {COMMAND}"


def test_the_page_says_how_it_was_made() -> None:
    assert COMMAND in PAGE.read_text().split("## ")[0]
