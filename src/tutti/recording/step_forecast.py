"""The measured step beside the predicted one: a line on rank 0, once.

    step 212 ms measured, 200 ms predicted; peak memory 84.1 MB measured, 84.2 MB predicted (29.5 MB of it
    held between calls)

The peak is that of `plan`, `simulate` and `explain`. Parameters, slots and the batch, which are held between
calls, are counted; what a call adds to them is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tutti.environment import PREDICTION
from tutti.quantities import format_nbytes, format_seconds


def beside(
    seconds: float | None,
    predicted: float | None,
    nbytes: int | None,
    predicted_nbytes: int | None,
    held_nbytes: int | None,
) -> str:
    """The line; "" where nothing is both measured and predicted.

    Args:
        seconds: of a step, measured.
        predicted: seconds of a step.
        nbytes: that a call adds at its peak, measured.
        predicted_nbytes: of these.
        held_nbytes: before and after a call.
    """
    parts = []
    if seconds is not None and predicted is not None:
        measured = format_seconds(seconds)
        parts.append(f"step {measured} measured, {format_seconds(predicted)} predicted")
    if nbytes is not None and predicted_nbytes is not None and held_nbytes is not None:
        if not parts and seconds is not None:
            parts.append(f"step {format_seconds(seconds)} measured")
        measured = format_nbytes(held_nbytes + nbytes)
        parts.append(
            f"peak memory {measured} measured, {format_nbytes(held_nbytes + predicted_nbytes)} predicted "
            f"({format_nbytes(held_nbytes)} of it held between calls)"
        )
    return "; ".join(parts)


def call_and_held(memory: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The predicted bytes that a call adds at its peak and those held between calls, of `memory_facts`."""
    peak, call = memory.get("peak_nbytes"), memory.get("call_nbytes")
    return call, None if peak is None or call is None else peak - call


def say(line: str, name: str) -> None:
    """Print the line of a step; `name` is that of its function, if there are several steps."""
    if line and PREDICTION.read():
        print(f"{name}: {line}" if name else line, file=sys.stderr, flush=True)
