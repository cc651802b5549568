"""`tutti simulate SCRIPT`: a step of a script on any devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.durable import check_file, check_writable
from tutti.errors import PlanError

if TYPE_CHECKING:
    from tutti.distributed_step import Step
    from tutti.hardware.cluster import Cluster
    from tutti.launch.script import Script
    from tutti.layout import Layout
    from tutti.planning.simulated_run import Faults, Recovery, SimulatedRun


def asked(layout: str, devices: str) -> tuple[Layout, Cluster]:
    """The layout and the devices of the options.

    Raises:
        LayoutError: no layout.
        PlanError: no devices.
    """
    from tutti.cli.given_layout import given_layout
    from tutti.planning.hardware_files import cluster_of

    parsed = given_layout(layout)
    parsed.check_available()
    if not devices:
        raise PlanError("simulate needs devices", fix=f'--devices "{parsed.num_ranks} x h100"')
    return parsed, cluster_of(devices)


def simulated(
    script: Script,
    arguments: list[str],
    layout: Layout,
    cluster: Cluster,
    faults: Faults,
    recovery: Recovery | None,
    *,
    rows: int | None,
    serve: float,
    trace: Path | None,
    svg: Path | None,
) -> None:
    """Print the step; write traces and the image."""
    from tutti.cli.look import look
    from tutti.planning.simulated_run import simulated_run
    from tutti.report import timeline as drawing
    from tutti.report.chrome_traces import write_traces

    if svg is not None:
        check_file(svg, "the image")
    if trace is not None:
        check_writable(trace, "trace", "--trace with a folder that you may write to")

    def seen(step: Step, batch: tuple[Any, ...]) -> SimulatedRun:
        from dataclasses import replace

        job = replace(step.mode.running.job, layout=layout)
        return simulated_run(job, batch, cluster, faults, recovery, rows=rows, serve=serve)

    def show(made: SimulatedRun) -> None:
        text = [_summary(made, faults, str(layout))]
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
    from tutti.quantities import format_count, format_nbytes, format_seconds

    one = made.estimate
    kinds = ", ".join(f"{kind} {format_seconds(x)}" for kind, x in one.kinds.items())
    sent = ", ".join(f"{format_nbytes(n)} {link}" for link, n in one.nbytes.items())
    lines = [
        f"{layout or 'one device'}: a step of {format_seconds(one.seconds)}: {kinds}",
        f"peak memory {format_nbytes(one.peak_nbytes)}; sent by a rank: {sent or 'nothing'}",
    ]
    if made.missing_nbytes:
        lines.append(
            f"does not fit: needs {format_nbytes(made.missing_nbytes)} more on a device, which has "
            f"{format_nbytes(made.capacity)} for a step"
        )
    lines += _slowdown(made, faults)
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
            f"{format_count(workers.updates_per_second)} updates a second; gradients are "
            f"{workers.staleness:.3g} updates old, {workers.most} at most; workers wait "
            f"{workers.waiting:.1%} of the time"
        )
    if made.reliability is not None:
        lines += _failures(made)
    return "\n".join(lines)


def _slowdown(made: SimulatedRun, faults: Faults) -> list[str]:
    """What the faults cost: of a step, and of workers that wait for servers only, in updates."""
    from tutti.quantities import format_count, format_seconds

    uses_links = made.estimate.nbytes.get("between", 0) > 0
    lines = []
    if faults.slow_link < 1 and not uses_links:
        lines.append(
            f"--slow-link {faults.slow_link:g} changes nothing: no rank of this layout sends to another host"
        )
    own = ["rank"] if faults.straggler > 1 else []
    own += ["links"] if faults.slow_link < 1 and uses_links else []
    if not own:
        return lines
    without = f"without the slow {' and '.join(own)}"
    if made.workers is not None and made.sound_workers is not None:
        rate, sound = made.workers.updates_per_second, made.sound_workers.updates_per_second
        return [
            *lines,
            f"{rate / sound:.3g} times as many updates a second as {without} ({format_count(sound)}); a step "
            f"of the slow worker takes {made.estimate.seconds / made.sound:.3g} times as long",
        ]
    return [
        *lines,
        f"{made.estimate.seconds / made.sound:.3g} times as long as {without} "
        f"({format_seconds(made.sound)})",
    ]


def _failures(made: SimulatedRun) -> list[str]:
    from tutti.quantities import format_count, format_seconds

    one = made.reliability
    assert one is not None
    best = one.best_interval()
    steps = max(1, round(best / made.estimate.seconds))
    interval = steps * made.estimate.seconds
    lines = [
        f"{one.num_devices} {'device' if one.num_devices == 1 else 'devices'} at work, a failure every "
        f"{format_seconds(one.mean_seconds)}: save every {format_count(steps)} "
        f"{'step' if steps == 1 else 'steps'} ({format_seconds(interval)}); goodput "
        f"{one.goodput(interval):.1%}",
    ]
    parts = {"a checkpoint": one.save, "a restart": one.restart}
    lines += [
        f"{what} takes {format_seconds(seconds)}, longer than the {format_seconds(one.mean_seconds)} between "
        "failures: the run hardly gets on"
        for what, seconds in parts.items()
        if seconds > one.mean_seconds
    ]
    return lines
