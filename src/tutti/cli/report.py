"""`tutti report`: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[
        Path, typer.Argument(help="The folder of tutti run --report, or of tutti verify --report.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The file to write; report.html in FOLDER by default."),
    ] = None,
) -> None:
    """Write what FOLDER records of a run as one page, which needs no network and no script."""
    from tutti.report.page.page import write_page

    print(write_page(folder, output), flush=True)
