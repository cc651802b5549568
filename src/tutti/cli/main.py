"""The `tutti` command: one file per subcommand, errors as their message."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tutti.cli.calibrate import calibrate
from tutti.cli.checkpoints import checkpoints
from tutti.cli.explain import explain
from tutti.cli.plan_layouts import plan
from tutti.cli.report import report
from tutti.cli.run import run
from tutti.cli.script_options import ScriptCommand
from tutti.cli.serve import serve
from tutti.cli.simulate import simulate
from tutti.cli.verify import verify
from tutti.errors import TuttiError

# Arguments after the script belong to the script, options included.
_SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False}
MISTAKE = 2


class _Commands(TyperGroup):
    """Shows a `TuttiError` as its message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TuttiError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(MISTAKE) from None


app = typer.Typer(
    cls=_Commands,
    help="Play one training step on many ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (run, serve, verify, explain, plan, simulate):
    app.command(cls=ScriptCommand, context_settings=_SCRIPT_TAKES_THE_REST)(_command)
for _command in (checkpoints, calibrate, report):
    app.command()(_command)


@app.callback()
def _tutti() -> None:
    """Play one training step on many ranks."""
