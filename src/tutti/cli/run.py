"""`tutti run`: start local ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.errors import LayoutError, TuttiError
from tutti.launch.script import Script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tutti.layout.layout import Layout
    from tutti.planning.plan_file import Plan


def run(
    script: Annotated[Script, SCRIPT],
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", min=1, help="Ranks to start; by default what the layout needs."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help='Such as "data=2 tensor=2 zero=1"; "auto" plans one for this machine.'),
    ] = "",
    plan: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Run a plan of tutti plan --save."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep each rank's output here.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Write a trace per rank here: the times of all ops of a few steps.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Keep records of the run here, and write its page, report.html."
        ),
    ] = None,
    servers: Annotated[
        str, typer.Option(help="Servers on other hosts, host:port,...: start workers only.")
    ] = "",
    first: Annotated[
        int, typer.Option(min=0, help="With --servers, the number of the first worker here.")
    ] = 0,
) -> None:
    """Run SCRIPT on ranks of this host. For several hosts, use torchrun, or tutti serve."""
    from tutti.environment import REPORT, check_seconds
    from tutti.layout.layout import Layout

    check_seconds()
    words = [*script.words, *(script_args or [])]
    made = None
    if plan is not None or "auto" in layout.split():
        made = _planned(plan, layout, num_ranks, words)
        layout, num_ranks = made.layout, made.num_ranks
    parsed = Layout.parse(layout)
    parsed.check_available()
    if servers:
        start = _workers(parsed, words, num_ranks, servers, first, log_dir)
    else:
        num_ranks = _check(num_ranks, layout, parsed)
        start = _started_here(parsed, words, num_ranks, layout, log_dir)
    if profile is not None:
        start = _profiled(profile, start)
    if report is not None or REPORT.read():
        told = {"command": words, "layout": layout, "num_ranks": num_ranks}
        told["profile"] = str(profile.resolve()) if profile is not None else ""
        start = _reported(report or Path(REPORT.read()), told, start, made)
    if made is not None:
        start = _following(made, plan, start)
    if log_dir is not None:
        from tutti.launch.run_dir import check_log_dir

        check_log_dir(log_dir)
    raise typer.Exit(start())


def _following(made: Plan, path: Path | None, start: Callable[[], int]) -> Callable[[], int]:
    """The start of a run whose ranks check that the plan is for their model; their errors name its file."""
    from tutti.environment import PLAN

    def play() -> int:
        if path is not None and path.is_file():
            os.environ[PLAN.name] = str(path.absolute())
            return start()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            made.write(file)
            os.environ[PLAN.name] = str(file)
            return start()

    return play


def _planned(path: Path | None, layout: str, num_ranks: int | None, words: list[str]) -> Plan:
    """The plan of a file; with "auto" it is made first, in a process of its own."""
    from tutti.planning.plan_file import Plan, ranks_text
    from tutti.quantities import format_nbytes, format_seconds

    if path is not None:
        if layout:
            raise LayoutError(f'--plan {path} and --layout "{layout}"', fix="one of them")
        made = Plan.read(path)
    else:
        made = _made_here(layout, num_ranks, words)
        print(
            f'layout "{made.layout or "one device"}": predicted {format_seconds(made.seconds)} a step, '
            f"{format_nbytes(made.peak_nbytes)} on a device",
            file=sys.stderr,
            flush=True,
        )
    if num_ranks not in (None, made.num_ranks):
        raise LayoutError(
            f"the plan is for {ranks_text(made.num_ranks)}, -n gives {num_ranks}",
            fix=f"-n {made.num_ranks}, or another plan",
        )
    return made


def _made_here(layout: str, num_ranks: int | None, words: list[str]) -> Plan:
    """The best layout for this machine, which keeps the other words of `layout`."""
    from tutti.planning.plan_file import Plan

    given = " ".join(word for word in layout.split() if word != "auto")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "tutti", "plan", "--save", str(file), "--layout", given]
        command += ["-n", str(num_ranks)] if num_ranks else []
        # A list without a shell, of this interpreter.
        ended = subprocess.run([*command, *words], stdout=subprocess.DEVNULL, check=False)  # noqa: S603
        if ended.returncode:
            raise typer.Exit(ended.returncode)
        return Plan.read(file)


def _started_here(
    layout: Layout, words: list[str], num_ranks: int, text: str, log_dir: Path | None
) -> Callable[[], int]:
    """The start of all processes of a run on this host."""
    if layout.server:
        from tutti.launch.roles import roles_of
        from tutti.launch.supervise import Supervisor

        return lambda: Supervisor(layout, roles_of(layout), words, log_dir=log_dir).run()
    from tutti.launch.launch import launch  # imports torch, after the check of the layout

    return lambda: launch(num_ranks, words[0], words[1:], text, log_dir=log_dir)


def _profiled(folder: Path, start: Callable[[], int]) -> Callable[[], int]:
    """The start of a run whose processes write traces to `folder`."""

    def play() -> int:
        _profile_to(folder)
        code = start()
        if code == 0:
            _summarize(folder)
        return code

    return play


def _reported(
    folder: Path, told: dict[str, Any], start: Callable[[], int], plan: Plan | None
) -> Callable[[], int]:
    """The start of a run with records in `folder`, and a page at its end, also if it fails."""
    from tutti.launch.reported import reported
    from tutti.recording.report_folder import PLAN, check_report_folder

    def play() -> int:
        check_report_folder(folder)
        if plan is not None:
            plan.write(folder / PLAN)
        try:
            return reported(folder, told, start)
        finally:
            _write_page(folder)

    return play


def _write_page(folder: Path) -> None:
    """Write the page, or say why there is none: the run has ended as it did in any case."""
    from tutti.report.page.page import write_page

    try:
        print(f"report: {write_page(folder)}", file=sys.stderr, flush=True)
    except (TuttiError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr, flush=True)


def _profile_to(folder: Path) -> None:
    """Let the processes of the run write traces to `folder`."""
    from tutti.environment import PROFILE
    from tutti.execution.profiling import check_folder

    check_folder(folder)
    os.environ[PROFILE.name] = str(folder.resolve())


def _summarize(folder: Path) -> None:
    """Print what the traces say, or why there is none: the run has ended well in any case."""
    from tutti.report.trace_summary import trace_summary

    try:
        print(trace_summary(folder), file=sys.stderr)
    except TuttiError as error:
        print(error, file=sys.stderr)


def _workers(
    layout: Layout,
    words: list[str],
    num_ranks: int | None,
    servers: str,
    first: int,
    log_dir: Path | None,
) -> Callable[[], int]:
    """The start of the workers of this host; the servers are elsewhere."""
    if not layout.server:
        raise LayoutError(
            f'--servers, but layout "{layout}" has no servers',
            fix='--layout "replica=2 server=1 sync=async"',
        )
    last = layout.num_replicas if num_ranks is None else first + num_ranks
    if not first < last <= layout.num_replicas:
        raise LayoutError(
            f'layout "{layout}" has workers 0 to {layout.num_replicas - 1}, '
            f"and {first} to {last - 1} were to start here",
            fix="-n for how many here, --first for the number of the first",
        )
    from tutti.environment import SERVERS
    from tutti.launch.roles import checked_secret, worker_roles
    from tutti.launch.supervise import Supervisor

    checked_secret()
    roles = worker_roles(layout, range(first, last))
    given: Any = {"environment": {SERVERS.name: servers}, "log_dir": log_dir}
    return lambda: Supervisor(layout, roles, words, **given).run()


def _check(num_ranks: int | None, text: str, layout: Layout) -> int:
    if not text:
        return num_ranks or 1
    needed = layout.num_ranks + layout.server
    if num_ranks is not None and num_ranks != needed:
        product = " * ".join(f"{axis}={size}" for axis, size in layout.axes.items())
        servers = f", and {layout.server} are servers" if layout.server else ""
        raise LayoutError(
            f'layout "{text}" needs {needed} ranks, -n gives {num_ranks}',
            why=f"{product} is {layout.num_ranks}{servers}",
            fix=f"-n {needed}, or {layout.nearest(num_ranks)}",
        )
    return needed
