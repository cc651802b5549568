"""`tutti explain`: where every tensor lives, every collective and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def explain(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script.")],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on as they are.")
    ] = None,
    layout: Annotated[str, typer.Option(help='Such as "data=2 tensor=2 zero=1".')] = "",
    tensor: Annotated[
        str | None, typer.Option(help="A name pattern: where these shardings came from.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="The partitioned graph as text.")] = False,
) -> None:
    """Partition the first training step of SCRIPT and print what every rank does; runs nothing."""
    from tutti.layout import Layout

    Layout.parse(layout).check_available()
    from tutti import api
    from tutti.cli.look import look
    from tutti.pipeline.ready import in_time
    from tutti.report.explanation import explain as explain_program
    from tutti.report.servers import explain_servers

    def seen(step: api.Step, batch: tuple[Any, ...]) -> None:
        if step.served is not None:
            made, program = step.served.parts_of(batch)
            print(explain_servers(made, program, step.layout, graph=graph), flush=True)
            return
        program = step.program_of(batch)
        made = in_time(program, cut_at=step.cut) if program.layout.in_time else None
        print(explain_program(program, tensor=tensor, graph=graph, made=made), flush=True)

    look(script, script_args or [], layout, seen)
