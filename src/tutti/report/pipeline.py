"""A step in micro-batches and stages as text: the stages' modules, the messages, and the schedule."""

from __future__ import annotations

import os

from tutti.pipeline.timed import Timed
from tutti.planner.simulator import Timeline
from tutti.planner.stages import Forecast, Stage, forecast
from tutti.quantities import format_nbytes, format_seconds
from tutti.report.text_table import columns
from tutti.report.timeline import staircase

# The most actions, and the most blocks of text, of a drawing.
MOST_ACTIONS, MOST_BLOCKS = 96, 3


def pipeline_text(made: Timed) -> str:
    """The stages with their predicted time, the messages between pipeline ranks, and the schedule drawn.

    For a step without stages, the part that runs once a micro-batch.
    """
    found = forecast(made)
    num_micro = made.bodies[0].num_micro
    whose = (
        f"Predicted seconds are those of {found.prices.device}, for comparison: "
        "tutti simulate --devices has those of your devices."
    )
    if len(found.stages) == 1:
        seconds = format_seconds(found.stages[0].seconds)
        return f"{num_micro} micro-batches, one after the other, predicted {seconds} each\n{whose}"
    blocks = [_stages_table(found), _messages_table(found)]
    if found.timeline is not None:
        blocks.append(_schedule_text(made, found.timeline))
    blocks.append(whose)
    blocks += [f"WARNING: {text}" for text in found.dear_cuts()]
    return "\n\n".join(blocks)


def _stages_table(found: Forecast) -> str:
    kinds = list(dict.fromkeys(k for s in found.stages for k in s.seconds_of))
    total = sum(s.seconds for s in found.stages) or 1.0
    rows = [
        (
            str(s.number),
            str(s.pipe_rank),
            *(format_seconds(s.seconds_of.get(k, 0.0)) for k in kinds),
            f"{s.seconds / total:.0%}",
            os.path.basename(s.source),
            _modules(s),
        )
        for s in found.stages
    ]
    return columns(("stage", "pipe", *kinds, "share", "begins at", "modules"), rows)


def _modules(stage: Stage, most: int = 8) -> str:
    """Their names; of many the first and the last."""
    names = stage.modules
    if len(names) > most:
        names = (*names[: most - 2], "...", names[-1])
    return ", ".join(names)


def _messages_table(found: Forecast) -> str:
    rows = [
        (
            f"{m.pipe_ranks[0]} -> {m.pipe_ranks[1]}",
            f"{m.edge[0]}{m.kind} for stage {m.edge[1]}" if m.edge else "outside of the loop",
            "once a micro-batch" if m.edge else "once a step",
            str(m.num_values),
            format_nbytes(m.nbytes),
            os.path.basename(m.source),
        )
        for m in found.messages
    ]
    total = sum(m.nbytes * m.times for m in found.messages)
    head = ("pipe", "what", "when", "values", "bytes each time", "made at")
    last = f"{format_nbytes(total)} a step cross between pipeline ranks"
    return f"{columns(head, rows)}\n{last}" if rows else "nothing crosses between places"


def _schedule_text(made: Timed, timeline: Timeline) -> str:
    schedule = made.schedule
    layout = made.programs[0].layout
    line = (
        f"schedule {layout.schedule or '1f1b'}: {schedule.num_stages} stages, {schedule.num_micro} "
        f"micro-batches, predicted {format_seconds(timeline.seconds)}, "
        f"{timeline.idle_share:.1%} of it idle"
    )
    if sum(map(len, timeline.rows)) > MOST_ACTIONS:
        return line
    drawn = staircase(timeline, label="pipe")
    return f"{drawn}\n\n{line}" if drawn.count("\n\n") < MOST_BLOCKS else line
