"""`tutti explain`: where every tensor lives, every collective and why."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.launch.script import Script


def explain(
    script: Annotated[Script, SCRIPT],
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    layout: Annotated[str, typer.Option(help='Such as "data=2 tensor=2 zero=1".')] = "",
    tensor: Annotated[
        str | None, typer.Option(help="A name pattern: where these shardings came from.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="The partitioned graph as text.")] = False,
) -> None:
    """Partition the first training step of SCRIPT and print what every rank does; runs nothing."""
    from tutti.cli.given_layout import given_layout

    given_layout(layout).check_available()
    from tutti.capture.batch import with_arguments
    from tutti.cli.look import look
    from tutti.distributed_step import Step

    def seen(step: Step, batch: tuple[Any, ...]) -> str:
        explain = partial(step.mode.explain_call, tensor=tensor, graph=graph)
        return with_arguments(explain, step.train_step, step.optimizer, batch)

    look(script, script_args or [], layout, seen, lambda text: print(text, flush=True))
