"""`tutti checkpoints`: the saved steps of a run."""

from __future__ import annotations

from typing import Annotated

import typer


def checkpoints(
    folder: Annotated[str, typer.Argument(help="The folder of a run, or its URL.")],
    check: Annotated[
        bool, typer.Option("--check", help="Read all files, compare checksums.")
    ] = False,
    prune: Annotated[
        int | None,
        typer.Option(min=1, help="Remove all but this many of the newest, and the best."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints that tutti.Checkpoints has saved in FOLDER."""
    from tutti.remote_paths import path_of
    from tutti.resuming import run_folder
    from tutti.resuming.retention import prune_folder
    from tutti.resuming.saved_table import saved_json, saved_table

    path = path_of(folder)
    if not path.is_dir():
        raise typer.BadParameter(f"{folder} is no directory", param_hint="FOLDER")
    if prune is not None:
        prune_folder(path, prune)
    saved = [run_folder.look_at(path, step, check=check) for step in run_folder.numbers(path)]
    text = saved_json if as_json else saved_table
    print(text(saved, checked=check), flush=True)
    raise typer.Exit(1 if any(one.damage or one.index for one in saved) else 0)
