"""`tutti simulate`: a step on any devices, or a pipeline schedule alone, on a clock."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.launch.script import Script

if TYPE_CHECKING:
    from tutti.pipeline.schedule.schedule import Schedule
    from tutti.planner.simulator import Timeline


def simulate(
    script: Annotated[Script | None, SCRIPT] = None,
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    layout: Annotated[str, typer.Option(help='With a script: such as "data=8 zero=3".')] = "",
    devices: Annotated[str, typer.Option(help='With a script: such as "64 x h100".')] = "",
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step; by default those of the script's.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write Chrome traces of the ranks here.")
    ] = None,
    straggler: Annotated[
        float, typer.Option(min=1, help="One rank computes so many times as long.")
    ] = 1.0,
    slow_link: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Links between hosts have this share of their rate."),
    ] = 1.0,
    mtbf: Annotated[
        float, typer.Option(min=0, help="Hours between failures of one device; 0 for none.")
    ] = 0.0,
    save_seconds: Annotated[float, typer.Option(min=0, help="A checkpoint stops training.")] = 10.0,
    restart_seconds: Annotated[
        float, typer.Option(min=0, help="From a failure to the first new step.")
    ] = 300.0,
    serve_seconds: Annotated[
        float, typer.Option(min=0, help="With server=: a server's time for one push.")
    ] = 0.0,
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved(2), zb, zbv, or a schedule file.")
    ] = "",
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline.")] = None,
    micro: Annotated[int | None, typer.Option(min=1, help="Micro-batches of a step.")] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Stages per rank.")] = 1,
    costs: Annotated[str, typer.Option(help="Time of each kind of action.")] = "F=1,I=1,W=1",
    transfer: Annotated[float, typer.Option(help="Time from rank to rank.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Also draw an SVG image here.")] = None,
) -> None:
    """Play a step of SCRIPT on a clock, on any devices; or, without it, a pipeline schedule alone."""
    from tutti.errors import PlanError, ScheduleError

    if script is not None:
        if schedule or ranks is not None or micro is not None:
            raise PlanError(
                "--schedule, --ranks and --micro do not go with a script",
                fix='words of the layout: --layout "pipe=4 micro=8 schedule=zb"',
            )
        from tutti.cli.simulated_script import asked, simulated

        parsed, cluster = asked(layout, devices)
        # Imports of seconds, behind the refusals.
        from tutti.planning.simulated_run import Faults, Recovery

        faults = Faults(straggler, slow_link)
        recovery = Recovery(3600 * mtbf, save_seconds, restart_seconds) if mtbf else None
        options = {"rows": global_batch, "serve": serve_seconds, "trace": trace, "svg": svg}
        words = script, script_args or []
        simulated(*words, parsed, cluster, faults, recovery, **options)
        return
    if not schedule:
        raise ScheduleError(
            "nothing to simulate",
            fix="a script with --layout and --devices, or --schedule zb --ranks 4 --micro 8",
        )
    name, chunks = _with_chunks(schedule, chunks)
    _alone(_schedule(name, ranks, micro, chunks), schedule, _costs(costs), transfer, svg)


def _alone(
    rows: Schedule, name: str, costs: dict[str, float], transfer: float, svg: Path | None
) -> None:
    """A schedule on a clock; needs no script and no device."""
    from tutti.planner import simulator
    from tutti.report import timeline as drawing

    played = simulator.simulate(rows, costs, transfer_seconds=transfer)
    print(drawing.staircase(played), _summary(name, played), sep="\n\n", flush=True)
    if svg is not None:
        drawing.write_svg(played, svg)


def _with_chunks(name: str, chunks: int) -> tuple[str, int]:
    """The name and the stages per rank of `interleaved(2)`, as a layout writes it; others unchanged."""
    from tutti.errors import ScheduleError

    found = re.fullmatch(r"(interleaved)\((\d+)\)", name.strip())
    if found is None:
        return name, chunks
    if chunks not in (1, int(found[2])):
        raise ScheduleError(
            f"--chunks {chunks}, and {name} has {found[2]} stages per rank",
            fix="leave --chunks out",
        )
    return found[1], int(found[2])


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
