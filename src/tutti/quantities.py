"""Bytes and seconds as text, with three digits and a suitable unit."""

from __future__ import annotations


def format_nbytes(nbytes: float) -> str:
    """`nbytes` with three digits: 12 B, 4.2 kB, 1.5 GB."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """`seconds` with three digits: 12 us, 4.2 ms, 1.5 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
