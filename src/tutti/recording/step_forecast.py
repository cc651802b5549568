"""The measured step beside the predicted one: a line on rank 0, once.

    step 212 ms measured, 200 ms predicted; memory 84.1 MB measured, 84.2 MB predicted

The memory is that of a call, above what is held before it.
"""

from __future__ import annotations

import sys

from tutti.environment import PREDICTION
from tutti.quantities import format_nbytes, format_seconds


def beside(
    seconds: float | None,
    predicted: float | None,
    nbytes: int | None,
    predicted_nbytes: int | None,
) -> str:
    """The line; "" where nothing is both measured and predicted."""
    parts = []
    if seconds is not None and predicted is not None:
        measured = format_seconds(seconds)
        parts.append(f"step {measured} measured, {format_seconds(predicted)} predicted")
    if nbytes is not None and predicted_nbytes is not None:
        if not parts and seconds is not None:
            parts.append(f"step {format_seconds(seconds)} measured")
        both = f"{format_nbytes(nbytes)} measured, {format_nbytes(predicted_nbytes)} predicted"
        parts.append(f"memory {both}")
    return "; ".join(parts)


def say(line: str, name: str) -> None:
    """Print the line of a step; `name` is that of its function, if there are several steps."""
    if line and PREDICTION.read():
        print(f"{name}: {line}" if name else line, file=sys.stderr, flush=True)
