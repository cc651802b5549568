"""What `remat=` takes: bytes with a unit, a share, or a word; it prints as it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.layout.budget import Budget, nbytes_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ("full", Budget()),
        ("2GB", Budget(nbytes=2_000_000_000)),
        ("1.5MB", Budget(nbytes=1_500_000)),
        ("0.5", Budget(share=0.5)),
        ("1", Budget(share=1.0)),
    ],
)
def test_words(text: str, expected: Budget | None) -> None:
    assert Budget.parse(text) == expected
    assert expected is None or Budget.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["2", "0", "0.0", "-1GB", "2gb", "GB", "half", "50%", "1e9", "8 GB"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(f"data=2 remat={text.replace(' ', '_')}")
    assert "is no budget" in caught.value.what and "remat=2GB" in caught.value.fix


@given(st.integers(1, 10**15))
def test_bytes_are_rounded_up_to_four_digits(nbytes: int) -> None:
    again = Budget.parse(nbytes_text(nbytes))
    assert again is not None and again.nbytes is not None
    assert nbytes <= again.nbytes <= max(nbytes * 1.0011, nbytes + 1)
