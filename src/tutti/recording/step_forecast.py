"""The measured step beside the predicted one: a line on rank 0, once.

    step 212 ms measured, 200 ms predicted; memory 84.1 MB measured, 84.2 MB predicted

The memory is that of a call, above what is held before it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from tutti.partition.partition import Program
from tutti.quantities import format_nbytes, format_seconds

# Each predicts the seconds of a step of a program and its graph; None where it cannot, as without figures of
# this machine. The first number counts.
SecondsPredictor = Callable[[Program, fx.Graph], float | None]
SECONDS_PREDICTORS: list[SecondsPredictor] = []


def predict_as(layout: str, seconds: float) -> None:
    """Let steps under `layout` have the prediction of a plan."""

    def planned(program: Program, graph: fx.Graph) -> float | None:
        return seconds if str(program.layout) == layout else None

    SECONDS_PREDICTORS[:] = [planned]


def predicted_seconds(program: Program, graph: fx.Graph) -> float | None:
    """The predicted seconds of a step of `program`; None if nothing can predict them here."""
    found = (predict(program, graph) for predict in SECONDS_PREDICTORS)
    return next((seconds for seconds in found if seconds is not None), None)


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
