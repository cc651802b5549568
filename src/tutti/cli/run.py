"""`tutti run`: start local ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.errors import LayoutError


def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script.")],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on as they are.")
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", min=1, help="Ranks to start; by default what the layout needs."),
    ] = None,
    layout: Annotated[str, typer.Option(help='Such as "data=2 tensor=2 zero=1".')] = "",
    log_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep each rank's output here.")
    ] = None,
) -> None:
    """Run SCRIPT on ranks of this host. For several hosts, use torchrun."""
    num_ranks = _check(num_ranks, layout)
    from tutti.runtime.launch import launch  # imports torch: a wrong layout is refused without it

    raise typer.Exit(launch(num_ranks, str(script), script_args or [], layout, log_dir=log_dir))


def _check(num_ranks: int | None, text: str) -> int:
    from tutti.layout.layout import Layout

    if not text:
        return num_ranks or 1
    layout = Layout.parse(text)
    layout.check_available()
    if num_ranks is not None and num_ranks != layout.num_ranks:
        raise LayoutError(
            f'layout "{text}" needs {layout.num_ranks} ranks, -n gives {num_ranks}',
            why=" * ".join(f"{axis}={size}" for axis, size in layout.axes.items())
            + f" is {layout.num_ranks}",
            fix=f"-n {layout.num_ranks}, or sizes whose product is {num_ranks}",
        )
    return layout.num_ranks
