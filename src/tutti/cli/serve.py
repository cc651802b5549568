"""`tutti serve`: one parameter server on this host, for workers on others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.errors import LayoutError
from tutti.launch.script import Script


def serve(
    script: Annotated[Script, SCRIPT],
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    layout: Annotated[str, typer.Option(help='Such as "replica=3 server=2 sync=async".')] = "",
    number: Annotated[int, typer.Option(min=0, help="Which of the layout's servers.")] = 0,
    listen: Annotated[str, typer.Option(help="host:port, reachable by the workers.")] = "",
    records: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep records here; go on from them.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Where records are damaged, go on from those before; the rest is set aside.",
        ),
    ] = False,
    linger: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for workers once all have left.")
    ] = 30.0,
) -> None:
    """Serve the variables of SCRIPT's step. TUTTI_SECRET holds what workers must know."""
    from tutti.cli.given_layout import given_layout

    parsed = given_layout(layout)
    parsed.check_available()
    if number >= parsed.server:
        raise LayoutError(
            f'layout "{parsed}" has {parsed.server} servers, none of them number {number}',
            fix=f"--number 0 to {parsed.server - 1}" if parsed.server else "server=1 in the layout",
        )
    if repair and records is None:
        raise LayoutError("--repair without records", fix="--records DIR, the damaged directory")
    from tutti.environment import LINGER, LISTEN, RECORDS, REPAIR
    from tutti.launch.roles import SERVER, Role, checked_secret
    from tutti.launch.supervise import Supervisor

    checked_secret()
    environment = {LINGER.name: str(linger), LISTEN.name: listen or "127.0.0.1:29600"}
    if records is not None:
        environment[RECORDS.name] = str(records.absolute())
    if repair:
        environment[REPAIR.name] = "1"
    command = [*script.words, *(script_args or [])]
    supervisor = Supervisor(parsed, [Role(SERVER, number)], command, environment=environment)
    raise typer.Exit(supervisor.run())
