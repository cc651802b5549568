"""The watch of a step: with records for a report, else for one line on the rank that leads."""

from __future__ import annotations

from tutti.job import Job
from tutti.recording.prediction_watch import PredictionWatch, prediction_watch_of
from tutti.recording.run_writer import writer
from tutti.recording.step_watch import StepWatch


def watch_of(
    job: Job, predicted_seconds: float | None = None
) -> StepWatch | PredictionWatch | None:
    """The watch of a new step; None for one that nothing is said about.

    `predicted_seconds`: of a step by the plan that chose the layout.
    """
    out = writer()
    if out is not None:
        return StepWatch(out, job, predicted_seconds)
    return prediction_watch_of(job, predicted_seconds)
