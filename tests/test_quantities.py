"""Three digits and the unit that suits them."""

from __future__ import annotations

import pytest

from tutti.quantities import format_count, format_nbytes, format_seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (4200, "4.2 kB"), (4.2e6, "4.2 MB"), (1.5e9, "1.5 GB")]
    + [(1.5e12, "1.5 TB"), (3e15, "3e+03 TB")],
)
def test_format_nbytes(nbytes: float, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (12e-6, "12 us"), (4.2e-3, "4.2 ms"), (1.5, "1.5 s"), (61.25, "61.2 s")]
    + [(600, "10 min"), (13_000, "3.61 h"), (90_000, "25 h"), (200_000, "2.31 days")]
    + [(1e9, "11,600 days")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.25, "0.25"),
        (12.345, "12.3"),
        (999.7, "1,000"),
        (1000, "1,000"),
        (18_784_508, "18,800,000"),
    ],
)
def test_format_count(number: float, text: str) -> None:
    assert format_count(number) == text
