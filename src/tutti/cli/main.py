"""The `tutti` command: one file per subcommand, errors as their message."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tutti.cli.calibrate import calibrate
from tutti.cli.checkpoints import checkpoints
from tutti.cli.ends import OwnProcess, told
from tutti.cli.explain import explain
from tutti.cli.plain_warnings import plain_warnings
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


class _Commands(TyperGroup):
    """Shows a `TuttiError` as its message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TuttiError as error:
            raise typer.Exit(told(error)) from None


class _Application(typer.Typer):
    """The commands; a call of it plays one as this process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        OwnProcess.begin()
        plain_warnings()
        return super().__call__(*args, **kwargs)


app = _Application(
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
