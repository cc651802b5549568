"""`tutti verify`: show that a layout computes the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def verify(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script.")],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on as they are.")
    ] = None,
    layout: Annotated[str, typer.Option(help='Such as "data=2 tensor=2 zero=1".')] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 2,
    report: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Also keep the verdict here, for tutti report."),
    ] = None,
) -> None:
    """Play the first training step of SCRIPT on virtual ranks, in float64, against one device."""
    from tutti.layout import Layout

    Layout.parse(layout).check_available()
    from tutti import api
    from tutti.cli.look import look
    from tutti.distributed_step import Step
    from tutti.recording.report_folder import check_report_folder
    from tutti.verification.verdict import Verdict
    from tutti.verification.verdict_file import write_verdict

    if report is not None:
        check_report_folder(report)
    verdicts: list[Verdict] = []

    def seen(step: Step, batch: tuple[Any, ...]) -> None:
        verdict = api.verify(
            step.train_step,
            step.model,
            step.optimizer,
            batch,
            step.layout,
            place=step.place,
            cut=step.cut,
            batch_dim=step.batch_dim,
            steps=steps,
            seed=step.seed,
        )
        verdicts.append(verdict)

    look(script, script_args or [], layout, seen)
    print(verdicts[0], flush=True)
    if report is not None:
        write_verdict(report, verdicts[0])
    raise typer.Exit(0 if verdicts[0].ok else 1)
