"""`tutti verify`: show that a layout computes the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.launch.script import Script


def verify(
    script: Annotated[Script, SCRIPT],
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    layout: Annotated[str, typer.Option(help='Such as "data=2 tensor=2 zero=1".')] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 2,
    report: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Also keep the verdict here, for tutti report."),
    ] = None,
) -> None:
    """Play the first training step of SCRIPT on virtual ranks, in float64, against one device."""
    from tutti.cli.given_layout import given_layout

    given_layout(layout).check_available()
    from tutti import api
    from tutti.cli.look import look
    from tutti.distributed_step import Step
    from tutti.recording.report_folder import check_report_folder
    from tutti.verification.verdict import Verdict
    from tutti.verification.verdict_file import write_verdict

    if report is not None:
        check_report_folder(report)

    def seen(step: Step, batch: tuple[Any, ...]) -> Verdict:
        return api.verify(
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

    def show(verdict: Verdict) -> int:
        print(verdict, flush=True)
        if report is not None:
            write_verdict(report, verdict)
        return 0 if verdict.ok else 1

    look(script, script_args or [], layout, seen, show)
