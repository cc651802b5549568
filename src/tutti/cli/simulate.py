"""`tutti simulate`: a pipeline schedule drawn, with its idle time, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tutti.pipeline.schedule.schedule import Schedule
    from tutti.planner.simulator import Timeline


def simulate(
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved, zb, zbv, or a schedule file.")
    ],
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline.")] = None,
    micro: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    chunks: Annotated[int, typer.Option(help="Stages per rank.")] = 1,
    costs: Annotated[str, typer.Option(help="Time of each kind of action.")] = "F=1,I=1,W=1",
    transfer: Annotated[float, typer.Option(help="Time from rank to rank.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Also draw an SVG image here.")] = None,
) -> None:
    """Play a pipeline schedule on a clock and draw it; needs no script and no device."""
    from tutti.errors import TuttiError
    from tutti.planner import simulator
    from tutti.report import timeline as drawing

    played = simulator.simulate(
        _schedule(schedule, ranks, micro, chunks), _costs(costs), transfer_seconds=transfer
    )
    print(drawing.staircase(played), _summary(schedule, played), sep="\n\n", flush=True)
    if svg is not None:
        try:
            svg.write_text(drawing.svg(played))
        except OSError as error:
            raise TuttiError(f"cannot write {svg}", why=str(error.strerror)) from None


def _schedule(name: str, ranks: int | None, micro: int | None, chunks: int) -> Schedule:
    from tutti.errors import ScheduleError
    from tutti.pipeline.schedule.schedule import Schedule
    from tutti.pipeline.schedule.schedules import SCHEDULES, schedule

    path = Path(name)
    if name not in SCHEDULES and path.is_file():
        if ranks is not None or micro is not None or chunks != 1:
            raise ScheduleError(
                f"--ranks, --micro and --chunks do not go with the file {name}",
                why="its lines and words say how many there are",
                fix="leave them out",
            )
        try:
            return Schedule.parse(path.read_text(), name)
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"cannot read {name}", why=str(error)) from None
    if name not in SCHEDULES and {"/", "."} & set(name):
        raise ScheduleError(
            f"there is no schedule file {name}",
            fix=f"the path of a file, or one of {', '.join(SCHEDULES)}",
        )
    if name in SCHEDULES and (ranks is None or micro is None):
        raise ScheduleError(
            f"schedule {name} needs --ranks and --micro",
            fix=f"--schedule {name} --ranks {ranks or 4} --micro {micro or 8}",
        )
    return schedule(name, ranks or 1, micro or 1, chunks)


def _costs(text: str) -> dict[str, float]:
    from tutti.errors import ScheduleError

    found: dict[str, float] = {}
    for word in text.split(","):
        kind, _, number = word.strip().partition("=")
        try:
            if kind not in ("F", "I", "W", "B", "G", "A"):
                raise ValueError
            found[kind] = float(number)
        except ValueError:
            raise ScheduleError(
                f'cannot read "{word.strip()}" in --costs "{text}"',
                why="a cost is a kind (F I W B G A) and a number",
                fix="--costs F=1,I=1,W=1",
            ) from None
    return found


def _summary(name: str, timeline: Timeline) -> str:
    from tutti.report.text_table import columns

    schedule = timeline.schedule
    head = (
        f"{name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro} "
        f"micro-batches; the step takes {timeline.seconds:g}, {timeline.idle_share:.1%} of it idle"
    )
    rows = [
        (
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            f"{idle:g}",
            f"{idle / timeline.seconds if timeline.seconds else 0.0:.1%}",
            str(timeline.peak_live[rank]),
        )
        for rank, idle in enumerate(timeline.idle_seconds)
    ]
    return (
        f"{head}\n{columns(('rank', 'stages', 'idle', 'share', 'most micro-batches live'), rows)}"
    )
