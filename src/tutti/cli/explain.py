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
    from tutti.cli.look import look
    from tutti.distributed_step import Step

    def seen(step: Step, batch: tuple[Any, ...]) -> None:
        print(step.mode.explain_call(batch, tensor=tensor, graph=graph), flush=True)

    look(script, script_args or [], layout, seen)
