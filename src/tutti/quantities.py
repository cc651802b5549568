"""Bytes, seconds and counts as text, with three digits and a suitable unit."""

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
    """`seconds` with three digits: 12 us, 4.2 ms, 1.5 s; from ten minutes on 12 min, 3.5 h, 3 days."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    for unit, size, end in (("s", 1, 10 * 60), ("min", 60, 2 * 3600), ("h", 3600, 2 * 86400)):
        if seconds < end:
            return f"{seconds / size:.3g} {unit}"
    return f"{format_count(seconds / 86400)} days"


def format_count(number: float) -> str:
    """A number of things, at most three digits of it: 0.25, 1,000, 18,800,000."""
    if number < 1000:
        return f"{number:.3g}" if number < 999.5 else "1,000"
    return f"{float(f'{number:.3g}'):,.0f}"
