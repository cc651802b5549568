"""`tutti simulate SCRIPT`: a step of a script on any devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.durable import check_file, check_writable
from tutti.errors import PlanError

if TYPE_CHECKING:
    from tutti.distributed_step import Step
    from tutti.launch.script import Script
    from tutti.planning.simulated_run import Faults, Recovery, SimulatedRun


def simulated(
    script: Script,
    arguments: list[str],
    layout: str,
    devices: str,
    faults: Faults,
    recovery: Recovery | None,
    *,
    rows: int | None,
    serve: float,
    trace: Path | None,
    svg: Path | None,
) -> None:
    """Print the step; write traces and the image.

    Raises:
        PlanError: no devices.
    """
    from tutti.cli.look import look
    from tutti.layout import Layout
    from tutti.planning.hardware_files import cluster_of
    from tutti.planning.simulated_run import simulated_run
    from tutti.report import timeline as drawing
    from tutti.report.chrome_traces import write_traces

    parsed = Layout.parse(layout)
    parsed.check_available()
    if not devices:
        raise PlanError("simulate needs devices", fix=f'--devices "{parsed.num_ranks} x h100"')
    cluster = cluster_of(devices)
    if svg is not None:
        check_file(svg, "the image")
    if trace is not None:
        check_writable(trace, "trace", "--trace with a folder that you may write to")

    def seen(step: Step, batch: tuple[Any, ...]) -> SimulatedRun:
        from dataclasses import replace

        job = replace(step.mode.running.job, layout=parsed)
        return simulated_run(job, batch, cluster, faults, recovery, rows=rows, serve=serve)

    def show(made: SimulatedRun) -> None:
        text = [_summary(made, faults, str(parsed))]
        if made.estimate.timeline is not None:
            text.append(drawing.staircase(made.estimate.timeline))
        print("\n\n".join(text), flush=True)
        if made.estimate.timeline is not None and svg is not None:
            drawing.write_svg(made.estimate.timeline, svg)
        if trace is not None:
            paths = write_traces(made.events, made.estimate.layout, made.played, trace)
            print(f"\n{_traces(len(paths), made)} in {trace}", flush=True)

    look(script, arguments, "", seen, show)


def _traces(num: int, made: SimulatedRun) -> str:
    from tutti.quantities import format_seconds

    words = (
        "1 trace, of one rank," if num == 1 else f"{num} traces, of one rank of each pipeline rank,"
    )
    if made.rounds is None:
        return words
    return f"{words} of a step of {format_seconds(made.played)} without a round of the replicas"


def _summary(made: SimulatedRun, faults: Faults, layout: str) -> str:
    from tutti.quantities import format_nbytes, format_seconds

    one = made.estimate
    kinds = ", ".join(f"{kind} {format_seconds(x)}" for kind, x in one.kinds.items())
    lines = [
        f"{layout or 'one device'}: a step of {format_seconds(one.seconds)}: {kinds}",
        f"peak memory {format_nbytes(one.peak_nbytes)}; sent by a rank: "
        + (", ".join(f"{format_nbytes(n)} {link}" for link, n in one.nbytes.items()) or "nothing"),
    ]
    if faults.straggler > 1 or faults.slow_link < 1:
        lines.append(
            f"{one.seconds / made.sound:.3g} times as long as without the slow rank and links "
            f"({format_seconds(made.sound)})"
        )
    if (rounds := made.rounds) is not None:
        lines.append(
            f"replicas agree by {rounds.strategy}: for each step {format_seconds(rounds.seconds)} in "
            f"which they wait, {format_seconds(rounds.hidden_seconds)} beside steps, "
            f"{format_nbytes(round(rounds.nbytes))} {rounds.link}"
        )
    if made.workers is not None:
        lines.append(
            "pushes to servers and pulls from them have no bytes here, and no time but --serve-seconds"
        )
        workers = made.workers
        lines.append(
            f"{workers.updates_per_second:.3g} updates a second; gradients are {workers.staleness:.3g} "
            f"updates old, {workers.most} at most; workers wait {workers.waiting:.1%} of the time"
        )
    if made.reliability is not None:
        lines += _failures(made)
    return "\n".join(lines)


def _failures(made: SimulatedRun) -> list[str]:
    from tutti.quantities import format_seconds

    one = made.reliability
    assert one is not None
    best = one.best_interval()
    steps = max(1, round(best / made.estimate.seconds))
    interval = steps * made.estimate.seconds
    return [
        f"{one.num_devices} {'device' if one.num_devices == 1 else 'devices'} at work, a failure every "
        f"{format_seconds(one.mean_seconds)}: save every {steps} steps "
        f"({format_seconds(interval)}); goodput {one.goodput(interval):.1%}",
    ]
