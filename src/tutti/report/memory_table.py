"""The predicted memory of a call as text: its peak, the kinds of bytes, and the largest values."""

from __future__ import annotations

import os

from tutti.planner.memory import PeakMemory
from tutti.quantities import format_nbytes
from tutti.report.text_table import columns


def memory_text(memory: PeakMemory, measured: int | None = None) -> str:
    """The peak, its kinds, its place, and the largest values there; `measured` beside the call's part."""
    kinds = {
        "state": memory.state_nbytes,
        "gradients": memory.gradient_nbytes,
        "activations": memory.activation_nbytes,
        "other": memory.other_nbytes,
    }
    split = ", ".join(f"{name} {format_nbytes(n)}" for name, n in kinds.items())
    where = ", ".join(filter(None, (memory.region, os.path.basename(memory.source))))
    call = f"of it {format_nbytes(memory.call_nbytes)} come and go with a call"
    if measured is not None:
        call += f"; measured {format_nbytes(measured)}"
    rows = [
        (
            h.name,
            h.kind,
            str(list(h.shape) or ""),
            format_nbytes(h.nbytes),
            os.path.basename(h.source),
        )
        for h in memory.largest
    ]
    head = ("largest then", "kind", "shape", "bytes", "made at")
    return "\n".join(
        (
            f"predicted peak {format_nbytes(memory.peak_nbytes)} per rank: {split}",
            f"at {memory.op} ({where}); {call}",
            columns(head, rows),
        )
    )
